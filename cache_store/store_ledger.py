"""Owns what the eviction policy is told of the store: the rows of all namespaces, as one set of paths.

Blocking; every call may raise the client's errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import redis

from warmstate.cache_store.eviction import plan_evictions
from warmstate.cache_store.eviction_rows import CheckpointRow, Evicted
from warmstate.cache_store.index_loader import find_segments, scan_checkpoints, scan_numbers, scan_segments
from warmstate.cache_store.index_rows import StoredCheckpoint, StoredSegment
from warmstate.cache_store.keys import SEGMENT_TOKENS
from warmstate.cache_store.names import IndexNames


@dataclass(frozen=True, slots=True)
class NamespaceLedger:
    """Everything that is indexed of one namespace, by prefix key."""

    names: IndexNames
    checkpoints: dict[bytes, StoredCheckpoint]
    segments: dict[bytes, StoredSegment]
    hits: dict[bytes, int]
    uses: dict[bytes, int]

    @property
    def num_bytes(self) -> int:
        checkpoint_bytes = sum(row.num_bytes for row in self.checkpoints.values())
        return checkpoint_bytes + sum(row.num_bytes for row in self.segments.values())

    def lineage(self, key: bytes) -> dict[int, bytes]:
        """The keys of the segments that a checkpoint needs by their end, down from the first that is unknown.

        A checkpoint whose rows contradict each other needs what is nowhere.
        """
        row, found = self.checkpoints[key], {}
        segment_key, position = row.segment_key, row.position // SEGMENT_TOKENS * SEGMENT_TOKENS
        if segment_key in self.segments and self.segments[segment_key].position != position:
            return {row.position: key}
        while segment_key is not None:
            found[position] = segment_key
            segment = self.segments.get(segment_key)
            if segment is None or segment.position != position:
                break
            segment_key, position = segment.parent_key, position - SEGMENT_TOKENS
        return found

    def path(self, key: bytes, lineage: Mapping[int, bytes]) -> tuple[bytes, ...]:
        """The keys of all that is known to lie above a checkpoint, shallowest first, and its own."""
        at = {self.checkpoints[key].position: key, **lineage}
        row = self.checkpoints[key]
        while row.parent_key is not None:
            at.setdefault(row.parent_position, row.parent_key)
            above = self.checkpoints.get(row.parent_key)
            if above is None or above.position != row.parent_position:
                break
            row = above
        return tuple(at[position] for position in sorted(at))


def load_ledger(client: redis.Redis, names: IndexNames) -> NamespaceLedger:
    """Reads a namespace. What is written meanwhile may be lacking, but no checkpoint without its segments."""
    segments = scan_segments(client, names)
    checkpoints = scan_checkpoints(client, names)
    missing = {row.segment_key for row in checkpoints.values()} - segments.keys() - {None}
    while missing:
        found = find_segments(client, names, [key for key in missing if key is not None])
        segments.update(found)
        missing = {row.parent_key for row in found.values()} - segments.keys() - {None}
    return NamespaceLedger(
        names, checkpoints, segments, scan_numbers(client, names.hits), scan_numbers(client, names.uses)
    )


def plan(
    ledgers: list[NamespaceLedger], surplus_bytes: int, now_ms: int, ms_per_token: Mapping[str, float]
) -> list[tuple[NamespaceLedger, Evicted]]:
    """What to give up, over all namespaces, until `surplus_bytes` fewer are held; the same prefix in two namespaces is
    two objects. `ms_per_token` says by short namespace what it costs to compute."""
    of = {ledger.names.short.encode(): ledger for ledger in ledgers}
    rows = [
        _as_plain(tag, ledger, key, ms_per_token[ledger.names.short])
        for tag, ledger in of.items()
        for key in ledger.checkpoints
    ]
    segments = [(tag + key, row.num_bytes) for tag, ledger in of.items() for key, row in ledger.segments.items()]
    target_bytes = max(sum(ledger.num_bytes for ledger in ledgers) - surplus_bytes, 0)
    length = len(next(iter(of), b""))
    return [
        (of[evicted.key[:length]], Evicted(evicted.kind, evicted.key[length:], evicted.position, evicted.reason))
        for evicted in plan_evictions(rows, segments, target_bytes, now_ms / 1000)
    ]


def _as_plain(tag: bytes, ledger: NamespaceLedger, key: bytes, ms_per_token: float) -> CheckpointRow:
    """A checkpoint that was never fetched counts as used once, when it was written."""
    row, lineage = ledger.checkpoints[key], ledger.lineage(key)
    return CheckpointRow(
        key=tag + key,
        position=row.position,
        num_bytes=row.num_bytes,
        segments=tuple(tag + lineage[position] for position in sorted(lineage)),
        boundaries=tuple(tag + boundary for boundary in ledger.path(key, lineage)),
        hits=1.0 + ledger.hits.get(key, 0),
        last_use_s=ledger.uses.get(key, row.created_ms) / 1000,
        kind=row.kind,
        ms_per_token=ms_per_token,
    )
