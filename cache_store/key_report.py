"""Owns what can be told, for people, of a key of ours that is no whole object: what it is for, and how large.

Calls raise the client's errors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import redis

from warmstate.cache_store.names import describe_name


@dataclass(frozen=True, slots=True)
class KeyReport:
    """`kind` is the server's word for the type, "none" where there is no such key; `size` counts entries, of a string
    its bytes; `ttl_s` None: it does not expire."""

    name: str
    meaning: str
    kind: str
    size: int
    ttl_s: float | None


def report_key(client: redis.Redis, name: str) -> KeyReport | None:
    """None for a name that is none of ours."""
    meaning = describe_name(name)
    if meaning is None:
        return None
    kind = cast(bytes, client.type(name)).decode("ascii", "replace")
    sizes: Mapping[str, Callable[[str], int]] = {
        "string": client.strlen,
        "hash": client.hlen,
        "stream": client.xlen,
        "set": lambda name: len(client.smembers(name)),
    }
    ttl_ms = client.pttl(name)
    return KeyReport(
        name, meaning, kind, sizes[kind](name) if kind in sizes else 0, ttl_ms / 1000 if ttl_ms >= 0 else None
    )
