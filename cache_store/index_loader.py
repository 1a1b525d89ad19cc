"""Owns the reading of what lies ready in the index: rows, counts and snapshots. Calls raise the client's errors.

HSCAN, never HGETALL: the index of a large store would hold up the server. Rows that cannot be read are left out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import redis

from warmstate.cache_store.index_rows import (
    StoredCheckpoint,
    StoredSegment,
    decode_checkpoint,
    decode_segment,
    is_of_newer_version,
)
from warmstate.cache_store.keys import KEY_BYTES
from warmstate.cache_store.names import NAMESPACES, IndexNames, index_names, is_short_namespace, snapshot_name
from warmstate.cache_store.snapshots import Snapshot, decode_snapshot

_SCAN_COUNT = 500

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Sample(Generic[_Row]):
    """Some rows of a hash, and the fields found among them that no version up to ours can have written."""

    rows: dict[bytes, _Row]
    unreadable: list[bytes]


@dataclass(frozen=True, slots=True)
class FoundSnapshots:
    """The snapshots of a namespace by replica id, the ids of replicas that have none, and the members of the set of
    replicas that are no id, or whose snapshot is damaged."""

    snapshots: dict[str, Snapshot]
    without: set[str]
    unreadable: list[bytes]


def iter_checkpoints(client: redis.Redis, names: IndexNames) -> Iterator[tuple[bytes, StoredCheckpoint]]:
    """The rows one by one, for whoever need not have them all at once; one may come twice."""
    return _decoded(client, names.checkpoints, decode_checkpoint)


def iter_segments(client: redis.Redis, names: IndexNames) -> Iterator[tuple[bytes, StoredSegment]]:
    return _decoded(client, names.segments, decode_segment)


def scan_checkpoints(client: redis.Redis, names: IndexNames) -> dict[bytes, StoredCheckpoint]:
    return dict(iter_checkpoints(client, names))


def scan_segments(client: redis.Redis, names: IndexNames) -> dict[bytes, StoredSegment]:
    return dict(iter_segments(client, names))


def iter_numbers(client: redis.Redis, name: str) -> Iterator[tuple[bytes, int]]:
    """A hash of prefix key -> number: `IndexNames.hits` or `.uses`."""
    return ((key, int(value)) for key, value in _scan(client, name) if len(key) == KEY_BYTES and value.isdigit())


def scan_numbers(client: redis.Redis, name: str) -> dict[bytes, int]:
    return dict(iter_numbers(client, name))


def sample_checkpoints(client: redis.Redis, names: IndexNames, count: int) -> Sample[StoredCheckpoint]:
    return _sample(client, names.checkpoints, count, decode_checkpoint)


def sample_segments(client: redis.Redis, names: IndexNames, count: int) -> Sample[StoredSegment]:
    return _sample(client, names.segments, count, decode_segment)


def find_checkpoints(client: redis.Redis, names: IndexNames, keys: Sequence[bytes]) -> dict[bytes, StoredCheckpoint]:
    """The rows of these checkpoints, as far as there are any."""
    return _find(client, names.checkpoints, keys, decode_checkpoint)


def find_segments(client: redis.Redis, names: IndexNames, keys: Sequence[bytes]) -> dict[bytes, StoredSegment]:
    """The rows of these segments, as far as there are any."""
    return _find(client, names.segments, keys, decode_segment)


def read_snapshots(client: redis.Redis, names: IndexNames) -> FoundSnapshots:
    """The snapshots of a namespace's replicas."""
    found = FoundSnapshots({}, set(), [])
    for member in sorted(cast(set[bytes], client.smembers(names.replicas))):
        try:
            replica_id = member.decode()
        except UnicodeDecodeError:
            found.unreadable.append(member)
            continue
        value = cast(bytes | None, client.get(snapshot_name(replica_id)))
        snapshot = decode_snapshot(replica_id, value) if value is not None else None
        if snapshot is not None and index_names(snapshot.namespace) == names:
            found.snapshots[replica_id] = snapshot
            continue
        found.without.add(replica_id)
        if value is not None and snapshot is None:
            found.unreadable.append(member)
    return found


def read_namespaces(client: redis.Redis) -> dict[str, tuple[str, int]]:
    """Every namespace in use: short name -> full digest in hex, and when a replica last said so, in ms."""
    found: dict[str, tuple[str, int]] = {}
    for field, value in _scan(client, NAMESPACES):
        digest, _, said_ms = value.decode("ascii", "replace").partition(" ")
        short = field.decode("ascii", "replace")
        if is_short_namespace(short) and digest.startswith(short) and said_ms.isdigit():
            found[short] = (digest, int(said_ms))
    return found


def _decoded(
    client: redis.Redis, name: str, decode: Callable[[bytes, bytes], _Row | None]
) -> Iterator[tuple[bytes, _Row]]:
    for key, value in _scan(client, name):
        row = decode(key, value)
        if row is not None:
            yield key, row


def _find(
    client: redis.Redis, name: str, keys: Sequence[bytes], decode: Callable[[bytes, bytes], _Row | None]
) -> dict[bytes, _Row]:
    values = cast(list[bytes | None], client.hmget(name, list(keys))) if keys else []
    rows = {key: decode(key, value) for key, value in zip(keys, values, strict=True) if value is not None}
    return {key: row for key, row in rows.items() if row is not None}


def _sample(client: redis.Redis, name: str, count: int, decode: Callable[[bytes, bytes], _Row | None]) -> Sample[_Row]:
    reply = cast(list[bytes], client.hrandfield(name, count, withvalues=True)) or []
    rows: dict[bytes, _Row] = {}
    unreadable: list[bytes] = []
    for key, value in zip(reply[::2], reply[1::2], strict=True):
        row = decode(key, value)
        if row is not None:
            rows[key] = row
        elif not is_of_newer_version(value):
            unreadable.append(key)
    return Sample(rows, unreadable)


def _scan(client: redis.Redis, name: str) -> Iterator[tuple[bytes, bytes]]:
    return cast(Iterator[tuple[bytes, bytes]], client.hscan_iter(name, count=_SCAN_COUNT))
