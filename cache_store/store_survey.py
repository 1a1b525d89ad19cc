"""Owns what a person can ask of a store: what is in it, by namespace and by checkpoint, and to empty a namespace.

SCAN and HSCAN only, and bounded memory, however much the store holds. Calls raise the client's errors.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, TypeVar, cast

import redis

from warmstate.cache_store.index_loader import (
    find_checkpoints as find_rows,
)
from warmstate.cache_store.index_loader import (
    find_segments,
    iter_checkpoints,
    iter_segments,
    read_namespaces,
    scan_numbers,
)
from warmstate.cache_store.index_rows import StoredCheckpoint
from warmstate.cache_store.keys import SEGMENT_TOKENS
from warmstate.cache_store.names import (
    LEASE,
    NAMESPACES,
    IndexNames,
    ObjectName,
    checkpoint_names,
    is_short_namespace,
    objects_pattern,
    replica_row_name,
)

Order = Literal["age", "hits", "bytes", "position"]

_BATCH = 500

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class ServerSummary:
    """One of the two servers; `max_bytes` None: it has no limit."""

    role: str
    version: str
    used_bytes: int
    max_bytes: int | None
    policy: str
    evicted_keys: int
    keys: int


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """What is indexed of one namespace. Ages in seconds; None where there is nothing to tell the age of."""

    namespace: str
    digest: str | None
    checkpoints: int
    checkpoint_bytes: int
    segments: int
    segment_bytes: int
    hits: int
    deepest_position: int
    kinds: dict[str, int]
    newest_age_s: float | None
    oldest_age_s: float | None
    replicas: int
    events: int


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint as its row tells it; `ttl_s` is the server's, None when the object is gone."""

    namespace: str
    key: str
    position: int
    kind: str
    num_bytes: int
    num_groups: int
    age_s: float
    ttl_s: float | None
    hits: int
    unused_s: float | None


def summarise_server(client: redis.Redis, role: str) -> ServerSummary:
    info: Mapping[str, Any] = client.info()
    version = info.get("valkey_version")
    return ServerSummary(
        role=role,
        version=f"valkey {version}" if version else f"redis {info['redis_version']}",
        used_bytes=int(info["used_memory"]),
        max_bytes=int(info.get("maxmemory", 0)) or None,
        policy=str(info.get("maxmemory_policy", "")),
        evicted_keys=int(info.get("evicted_keys", 0)),
        keys=client.dbsize(),
    )


def find_lease(index: redis.Redis) -> str | None:
    """Which replica evicts now; None: nobody."""
    value = cast(bytes | None, index.get(LEASE))
    return value.decode("utf-8", "replace").rpartition(" ")[0] if value is not None else None


def find_namespaces(index: redis.Redis) -> list[str]:
    """The short names of all namespaces that are indexed."""
    prefix = "ws:ix:{"
    found = {
        name.decode(errors="replace")[len(prefix) : -1] for name in index.scan_iter(match=f"{prefix}*", count=_BATCH)
    }
    return sorted({short for short in found if is_short_namespace(short)} | read_namespaces(index).keys())


def summarise_namespace(index: redis.Redis, short: str) -> NamespaceSummary:
    names, now = IndexNames(short), time.time()
    kinds: Counter[str] = Counter()
    num_bytes = deepest = newest_ms = 0
    oldest_ms = now * 1000
    for _, row in iter_checkpoints(index, names):
        kinds[row.kind] += 1
        num_bytes += row.num_bytes
        deepest = max(deepest, row.position)
        oldest_ms, newest_ms = min(oldest_ms, row.created_ms), max(newest_ms, row.created_ms)
    segments = segment_bytes = 0
    for _, segment in iter_segments(index, names):
        segments, segment_bytes = segments + 1, segment_bytes + segment.num_bytes
    return NamespaceSummary(
        namespace=short,
        digest=read_namespaces(index).get(short, (None, 0))[0],
        checkpoints=kinds.total(),
        checkpoint_bytes=num_bytes,
        segments=segments,
        segment_bytes=segment_bytes,
        hits=sum(scan_numbers(index, names.hits).values()),
        deepest_position=deepest,
        kinds=dict(sorted(kinds.items())),
        newest_age_s=max(now - newest_ms / 1000, 0.0) if kinds else None,
        oldest_age_s=max(now - oldest_ms / 1000, 0.0) if kinds else None,
        replicas=_count_replicas(index, names),
        events=index.xlen(names.events),
    )


def list_checkpoints(
    index: redis.Redis, payload: redis.Redis, shorts: Iterable[str], order: Order, limit: int
) -> list[CheckpointEntry]:
    """At most `limit` checkpoints: the newest, or those with the most hits, bytes or tokens."""
    by: Mapping[Order, Callable[[CheckpointEntry], tuple[float, str]]] = {
        "age": lambda entry: (entry.age_s, entry.key),
        "hits": lambda entry: (-entry.hits, entry.key),
        "bytes": lambda entry: (-entry.num_bytes, entry.key),
        "position": lambda entry: (-entry.position, entry.key),
    }
    entries = (entry for short in shorts for entry in _entries(index, IndexNames(short)))
    best = heapq.nsmallest(limit, entries, key=by[order])
    return [entry for batch in _batches(best) for entry in _with_ttl(payload, batch)]


def find_checkpoints(index: redis.Redis, shorts: Iterable[str], key_start: str) -> list[CheckpointEntry]:
    """The checkpoints whose key in hex begins so, without their time to live."""
    entries = (entry for short in shorts for entry in _entries(index, IndexNames(short)))
    return [entry for entry in entries if entry.key.startswith(key_start)]


def needed_objects(index: redis.Redis, entry: CheckpointEntry) -> list[ObjectName]:
    """All objects that a checkpoint consists of, its KV segments shallowest first; as far as rows tell."""
    names, key = IndexNames(entry.namespace), bytes.fromhex(entry.key)
    row = find_rows(index, names, [key]).get(key)
    if row is None:
        return []
    segments: list[bytes] = []
    segment_key = row.segment_key
    while segment_key is not None and len(segments) < row.position // SEGMENT_TOKENS:
        segments.append(segment_key)
        segment = find_segments(index, names, [segment_key]).get(segment_key)
        segment_key = segment.parent_key if segment is not None else None
    return [
        *(ObjectName(names.short, key, group, "ck") for group in range(row.num_groups)),
        *(ObjectName(names.short, segment_key, 0, "kv") for segment_key in reversed(segments)),
    ]


def flush_namespace(index: redis.Redis, payload: redis.Redis, short: str) -> int:
    """Removes all objects and rows of a namespace, and nothing else; gives the number of objects.

    The rows first: followers notice that the stream is gone, and start over.
    """
    index.unlink(*IndexNames(short).all())
    index.hdel(NAMESPACES, short)
    num_removed = 0
    for batch in _batches(payload.scan_iter(match=objects_pattern(short), count=_BATCH)):
        pipeline = payload.pipeline(transaction=False)
        for name in batch:
            pipeline.unlink(name)
        num_removed += sum(int(removed) for removed in pipeline.execute())
    return num_removed


def _count_replicas(index: redis.Redis, names: IndexNames) -> int:
    members = cast(set[bytes], index.smembers(names.replicas))
    return sum(bool(index.exists(replica_row_name(member.decode(errors="replace")))) for member in members)


def _entries(index: redis.Redis, names: IndexNames) -> Iterator[CheckpointEntry]:
    now = time.time()
    for batch in _batches(iter_checkpoints(index, names)):
        keys = [key for key, _ in batch]
        hits, uses = index.hmget(names.hits, keys), index.hmget(names.uses, keys)
        for (key, row), num_hits, used_ms in zip(batch, hits, uses, strict=True):
            yield _entry(names, key, row, now, _number(num_hits) or 0, _number(used_ms))


def _entry(
    names: IndexNames, key: bytes, row: StoredCheckpoint, now: float, num_hits: int, used_ms: int | None
) -> CheckpointEntry:
    return CheckpointEntry(
        namespace=names.short,
        key=key.hex(),
        position=row.position,
        kind=row.kind,
        num_bytes=row.num_bytes,
        num_groups=row.num_groups,
        age_s=max(now - row.created_ms / 1000, 0.0),
        ttl_s=None,
        hits=num_hits,
        unused_s=None if used_ms is None else max(now - used_ms / 1000, 0.0),
    )


def _with_ttl(payload: redis.Redis, entries: list[CheckpointEntry]) -> Iterator[CheckpointEntry]:
    pipeline = payload.pipeline(transaction=False)
    for entry in entries:
        pipeline.pttl(checkpoint_names(IndexNames(entry.namespace), bytes.fromhex(entry.key), 1)[0])
    for entry, ttl_ms in zip(entries, pipeline.execute(), strict=True):
        yield replace(entry, ttl_s=ttl_ms / 1000 if ttl_ms >= 0 else None)


def _batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    rest = iter(items)
    while batch := list(islice(rest, _BATCH)):
        yield batch


def _number(value: bytes | str | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None
