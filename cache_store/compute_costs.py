"""Owns what it costs to compute a token in each namespace, as its replicas measure it. Calls raise the client's errors.

A namespace keeps its last figure when its replicas have gone.
"""

import contextlib
from collections.abc import Iterable, Mapping
from statistics import fmean

import redis

from warmstate.cache_store.names import IndexNames, short_namespace
from warmstate.cache_store.replica_rows import PREFILL_RATE, read_rows


def update_costs(client: redis.Redis, namespaces: Iterable[IndexNames]) -> dict[str, float]:
    """Milliseconds per token by short namespace; one that was never measured costs as much as the others on average."""
    names = list(namespaces)
    measured = _measured(client)
    # A full server refuses this, and must be emptied all the same.
    with contextlib.suppress(redis.exceptions.OutOfMemoryError):
        for each in names:
            if each.short in measured:
                client.set(each.cost, f"{measured[each.short]:.6g}")
    known = {each.short: cost for each in names if (cost := measured.get(each.short) or _last(client, each))}
    typical = fmean(known.values()) if known else 1.0
    return {each.short: known.get(each.short, typical) for each in names}


def _measured(client: redis.Redis) -> Mapping[str, float]:
    costs: dict[str, list[float]] = {}
    for row in read_rows(client).values():
        rate = row.stats.get(PREFILL_RATE, 0.0)
        if row.namespace and rate > 0:
            costs.setdefault(short_namespace(bytes.fromhex(row.namespace)), []).append(1000 / rate)
    return {short: fmean(each) for short, each in costs.items()}


def _last(client: redis.Redis, names: IndexNames) -> float | None:
    value = client.get(names.cost)
    try:
        cost = float(value) if isinstance(value, bytes) else 0.0
    except ValueError:
        return None
    return cost if 0 < cost < float("inf") else None
