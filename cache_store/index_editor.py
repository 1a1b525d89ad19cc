"""Owns how the lease holder changes the index: rows and the events that tell of them together, under its fence."""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from warmstate.cache_store.event_log import STREAM_MAX_ENTRIES
from warmstate.cache_store.events import EventEntry, PrefixEvent, encode_lost_segments
from warmstate.cache_store.index_rows import StoredCheckpoint, StoredSegment
from warmstate.cache_store.lease import EvictionLease
from warmstate.cache_store.names import NAMESPACES, IndexNames


@dataclass(frozen=True, slots=True)
class RowsOf:
    """Some rows of one namespace, by prefix key."""

    checkpoints: Mapping[bytes, StoredCheckpoint]
    segments: Mapping[bytes, StoredSegment]

    @property
    def is_empty(self) -> bool:
        return not self.checkpoints and not self.segments

    @property
    def num_bytes(self) -> int:
        """Of the objects that they describe."""
        checkpoint_bytes = sum(row.num_bytes for row in self.checkpoints.values())
        return checkpoint_bytes + sum(row.num_bytes for row in self.segments.values())

    def batches(self, size: int) -> "Iterator[RowsOf]":
        """The same rows, at most so many of each kind at once."""
        checkpoints, segments = list(self.checkpoints.items()), list(self.segments.items())
        for start in range(0, max(len(checkpoints), len(segments)), size):
            yield RowsOf(dict(checkpoints[start : start + size]), dict(segments[start : start + size]))

    def __len__(self) -> int:
        return len(self.checkpoints) + len(self.segments)


class IndexEditor:
    """Changes namespaces that the lease has claimed. Every call may raise `LeaseLost`, and then has changed nothing."""

    def __init__(self, lease: EvictionLease, candidate: str) -> None:
        self._lease = lease
        self._writer = f"keeper:{candidate}"
        self._next_seq: Counter[tuple[str, int]] = Counter()

    def remove(self, names: IndexNames, rows: RowsOf) -> None:
        """Removes rows, with all that is counted of them, and tells followers, who must put lost KV segments again.

        A full server takes no entries: then followers find out when they use what is gone.
        """
        epoch = self._lease.token
        first_seq = self._next_seq[names.short, epoch]
        entries = [
            EventEntry(self._writer, epoch, seq, PrefixEvent("remove", key, row.position, "store"))
            for seq, (key, row) in enumerate(rows.checkpoints.items(), start=first_seq)
        ]
        try:
            self._lease.change(names, lambda pipeline: _queue_removal(pipeline, names, rows, entries, rows.segments))
            self._next_seq[names.short, epoch] += len(entries)
        except redis.exceptions.OutOfMemoryError:
            self._lease.change_when_full(names, lambda pipeline: _queue_removal(pipeline, names, rows, [], ()))

    def tell_lost_segments(self, names: IndexNames, keys: Collection[bytes]) -> None:
        """Tells followers of KV segments that are gone and had no rows. A full server takes no entries, as above."""
        with contextlib.suppress(redis.exceptions.OutOfMemoryError):
            self._lease.change(names, lambda pipeline: _queue_entry(pipeline, names, encode_lost_segments(keys)))

    def remove_unreadable(self, names: IndexNames, checkpoints: Sequence[bytes], segments: Sequence[bytes]) -> None:
        """Removes fields that hold no row; nobody has ever taken them for one, so nobody is told."""
        if checkpoints:
            self._lease.change(names, lambda pipeline: pipeline.hdel(names.checkpoints, *checkpoints))
        if segments:
            self._lease.change(names, lambda pipeline: pipeline.hdel(names.segments, *segments))

    def forget_namespace(self, client: redis.Redis, names: IndexNames) -> None:
        """Removes all that is indexed of a namespace."""
        self._lease.change(names, lambda pipeline: pipeline.unlink(*names.all()))
        client.hdel(NAMESPACES, names.short)


def _queue_removal(
    pipeline: Any, names: IndexNames, rows: RowsOf, entries: Sequence[EventEntry], lost: Collection[bytes]
) -> None:
    if rows.checkpoints:
        for name in (names.checkpoints, names.hits, names.uses):
            pipeline.hdel(name, *rows.checkpoints)
    if rows.segments:
        pipeline.hdel(names.segments, *rows.segments)
    for entry in entries:
        _queue_entry(pipeline, names, entry.encode())
    if lost:
        _queue_entry(pipeline, names, encode_lost_segments(lost))


def _queue_entry(pipeline: Any, names: IndexNames, fields: Mapping[str, str | int | bytes]) -> None:
    pipeline.xadd(names.events, dict(fields), maxlen=STREAM_MAX_ENTRIES, approximate=True)
