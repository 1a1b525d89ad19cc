"""Owns a replica's end of the index: it sends what the replica tells, in order, and survives the server.

Knows neither who reads nor why a prefix became usable.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import redis

from warmstate.cache_store.events import EventEntry, PrefixEvent, encode_lost_segments
from warmstate.cache_store.index_rows import StoredCheckpoint, StoredSegment
from warmstate.cache_store.known_paths import PATHS_MAX_ENTRIES, encode_path
from warmstate.cache_store.names import NAMESPACES, index_names, snapshot_name
from warmstate.cache_store.prefix_index import IndexRow
from warmstate.cache_store.redis_client import StoreAddress, open_client
from warmstate.cache_store.snapshots import MAX_SNAPSHOT_ROWS, Snapshot

STREAM_MAX_ENTRIES = 100_000
SNAPSHOT_PERIOD_S = 30.0
SNAPSHOT_TTL_MS = 100_000

_BATCH = 256
_MAX_WAITING = 10_000
_MAX_WAITING_HITS = 10_000
_MAX_WAITING_LOST = 10_000
_RETRY_S = 0.5
_LOOK_PERIOD_S = 1.0
_CLOSE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class _Told:
    """One event; what became usable in the store comes with the rows that describe it, and the path to it."""

    event: PrefixEvent
    row: StoredCheckpoint | None = None
    segments: Mapping[bytes, StoredSegment] = field(default_factory=dict)
    path: Sequence[bytes] = ()


class EventLog:
    """One replica's writer. Nothing blocks its caller: a thread of its own sends, and tries again while the server is
    away. Rows and the events that tell of them go in one transaction, so that the rows are the sum of the events.

    When the stream has lost our entries, everything this replica can serve is told again, also by one that has
    nothing new to tell: the client library hides that it has connected anew. `keeps_store_rows`: what this replica
    has put into the store is told again too, which makes sense where the objects lie on another server than the index.
    """

    def __init__(
        self,
        address: StoreAddress,
        namespace: bytes,
        replica_id: str,
        epoch: int,
        *,
        keeps_store_rows: bool = False,
        snapshot_period_s: float = SNAPSHOT_PERIOD_S,
    ) -> None:
        self._client = open_client(address, max_connections=1)
        self._namespace = namespace
        self._names = index_names(namespace)
        self._replica_id = replica_id
        self._epoch = epoch
        self._keeps_store_rows = keeps_store_rows
        self._snapshot_period_s = snapshot_period_s
        self._wake = threading.Condition()
        self._waiting: deque[_Told] = deque()
        self._live: dict[tuple[bytes, bool], _Told] = {}
        self._hits: Counter[bytes] = Counter()
        self._lost_segments: set[bytes] = set()
        self._next_seq = 0
        self._counts = Counter(dict.fromkeys(("sent", "lost", "hits_sent", "hits_lost", "snapshots"), 0))
        self._last_id: bytes | None = None
        self._snapshot_at: float | None = None
        self._snapshot_is_due = True
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="warmstate-events", daemon=True)
        self._thread.start()

    def append(
        self,
        event: PrefixEvent,
        row: StoredCheckpoint | None = None,
        segments: Mapping[bytes, StoredSegment] | None = None,
        path: Sequence[bytes] = (),
    ) -> None:
        """Queues one event, and the rows of what it adds to the store: of the checkpoint, and of the KV segments that
        were put with it, by their key. `path` are the keys of the boundaries that lead to it, as far as they are news.
        Beyond the queue's limit the oldest is lost, and readers will see the gap."""
        assert (row is not None) == (event.is_of_store and event.op == "add"), "a row describes what the store holds"
        told = _Told(event, row, segments or {}, path)
        with self._wake:
            self._remember(told)
            self._waiting.append(told)
            if len(self._waiting) > _MAX_WAITING:
                self._waiting.popleft()
                self._next_seq += 1
                self._counts["lost"] += 1
                self._snapshot_is_due = True
            self._wake.notify()

    def count_hit(self, key: bytes) -> None:
        """Counts one use of a checkpoint in the store; hits are sent in batches and never wake the thread."""
        with self._wake:
            self._queue_hits(key, 1)

    def tell_lost_segment(self, key: bytes) -> None:
        """Queues the news that the store no longer holds the KV segment of this prefix key."""
        with self._wake:
            self._queue_lost_segment(key)
            self._wake.notify()

    def stats(self) -> dict[str, float]:
        """Counters since the start, what waits now, and the age of the last snapshot (0 before the first)."""
        with self._wake:
            age_s = time.monotonic() - self._snapshot_at if self._snapshot_at is not None else 0.0
            return {
                "events_sent": float(self._counts["sent"]),
                "events_lost": float(self._counts["lost"]),
                "events_waiting": float(len(self._waiting)),
                "hits_told": float(self._counts["hits_sent"]),
                "hits_lost": float(self._counts["hits_lost"]),
                "snapshots_written": float(self._counts["snapshots"]),
                "snapshot_age_s": age_s,
            }

    def close(self) -> None:
        """Sends what waits, as far as the server takes it at once, and ends the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _remember(self, told: _Told) -> None:
        """Keeps what must be told again to a server that lost it."""
        event = told.event
        if event.is_of_store and not self._keeps_store_rows:
            return
        name = (event.key, event.is_of_store)
        self._live.pop(name, None)
        if event.op == "add":
            self._live[name] = told
            if len(self._live) > MAX_SNAPSHOT_ROWS:
                del self._live[next(iter(self._live))]

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            if self._send(batch):
                continue
            with self._wake:
                if self._closed:
                    break
                self._wake.wait_for(lambda: self._closed, _RETRY_S)
        self._client.close()

    def _next_batch(self) -> list[_Told] | None:
        """Waits for events; they stay queued until they are sent. Empty when it is time to look after the stream, None
        when closed and nothing waits."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._lost_segments or self._closed, _LOOK_PERIOD_S)
            if not self._waiting:
                return None if self._closed and not self._hits and not self._lost_segments else []
            return [self._waiting[index] for index in range(min(_BATCH, len(self._waiting)))]

    def _send(self, batch: list[_Told]) -> bool:
        """Looks for our last entry and adds the batch in one transaction, so that no restart falls between the two."""
        last_id = self._last_id
        with self._wake:
            first_seq, hits, lost = self._next_seq, self._hits, self._lost_segments
            self._hits, self._lost_segments = Counter(), set()
        pipeline = self._client.pipeline(transaction=True)
        if last_id is not None:
            pipeline.xrange(self._names.events, last_id, last_id, count=1)
        self._add_hits(pipeline, hits)
        if lost:
            self._add_entry(pipeline, encode_lost_segments(lost))
        if batch:
            pipeline.sadd(self._names.replicas, self._replica_id)
        for seq, told in enumerate(batch, start=first_seq):
            self._add(pipeline, seq, told)
        try:
            replies = pipeline.execute()
            if batch:
                self._last_id = replies[-1]
                self._drop_sent(first_seq + len(batch), len(batch))
            self._counts["hits_sent"] += hits.total()
            hits, lost = Counter(), set()
            if last_id is not None and not replies[0]:
                self._tell_all_again()
            self._write_snapshot_if_due()
        except (redis.RedisError, OSError):
            self._put_back(hits, lost)
            return False
        return True

    def _put_back(self, hits: Counter[bytes], lost: set[bytes]) -> None:
        """After a failure; what was sent all the same is told twice, which a hint survives."""
        with self._wake:
            for key, count in hits.items():
                self._queue_hits(key, count)
            for key in lost:
                self._queue_lost_segment(key)
            self._snapshot_is_due = True

    def _queue_hits(self, key: bytes, count: int) -> None:
        if key in self._hits or len(self._hits) < _MAX_WAITING_HITS:
            self._hits[key] += count
        else:
            self._counts["hits_lost"] += count

    def _queue_lost_segment(self, key: bytes) -> None:
        if key in self._lost_segments or len(self._lost_segments) < _MAX_WAITING_LOST:
            self._lost_segments.add(key)
        else:
            self._counts["lost"] += 1

    def _add(self, pipeline: Any, seq: int, told: _Told) -> None:
        """The rows first, the entry last: its id is the batch's last reply."""
        event, names = told.event, self._names
        if told.row is not None:
            pipeline.hset(names.checkpoints, event.key, told.row.encode())
            if told.segments:
                pipeline.hset(names.segments, mapping={key: row.encode() for key, row in told.segments.items()})
        elif event.is_of_store:
            for name in (names.checkpoints, names.hits, names.uses):
                pipeline.hdel(name, event.key)
        if told.path:
            pipeline.xadd(names.paths, encode_path(told.path), maxlen=PATHS_MAX_ENTRIES, approximate=True)
        self._add_entry(pipeline, EventEntry(self._replica_id, self._epoch, seq, event).encode())

    def _add_entry(self, pipeline: Any, fields: Mapping[str, str | int | bytes]) -> None:
        pipeline.xadd(self._names.events, dict(fields), maxlen=STREAM_MAX_ENTRIES, approximate=True)

    def _add_hits(self, pipeline: Any, hits: Counter[bytes]) -> None:
        now_ms = time.time_ns() // 1_000_000
        for key, count in hits.items():
            pipeline.hincrby(self._names.hits, key, count)
            pipeline.hset(self._names.uses, key, now_ms)

    def _drop_sent(self, next_seq: int, num_sent: int) -> None:
        """While the batch was under way the queue may have lost its oldest events: those were sent all the same."""
        with self._wake:
            for _ in range(max(0, next_seq - self._next_seq)):
                self._waiting.popleft()
            self._next_seq = max(self._next_seq, next_seq)
            self._counts["sent"] += num_sent

    def _tell_all_again(self) -> None:
        """Puts the live rows before what waits; the gap in `seq` makes readers forget this replica's older rows."""
        with self._wake:
            waiting = {(told.event.key, told.event.is_of_store) for told in self._waiting}
            self._waiting.extendleft(told for name, told in reversed(self._live.items()) if name not in waiting)
            self._next_seq += 1
            self._last_id = None
            self._snapshot_is_due = True

    def _write_snapshot_if_due(self) -> None:
        now = time.monotonic()
        is_due = self._snapshot_at is None or now - self._snapshot_at >= self._snapshot_period_s
        if not (is_due or self._snapshot_is_due):
            return
        with self._wake:
            self._snapshot_is_due = False
        last = cast(list[tuple[bytes, object]], self._client.xrevrange(self._names.events, count=1))
        stream_id = last[0][0].decode() if last else "0-0"
        with self._wake:
            live, next_seq = list(self._live.values()), self._next_seq + len(self._waiting)
        # Not under the lock, for which callers of `append` would wait: there may be tens of thousands.
        rows = {told.event.key: _row_of(told.event) for told in live if not told.event.is_of_store}
        snapshot = Snapshot(self._replica_id, self._namespace, self._epoch, next_seq, stream_id, rows)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.sadd(self._names.replicas, self._replica_id)
        pipeline.set(snapshot_name(self._replica_id), snapshot.encode(), px=SNAPSHOT_TTL_MS)
        pipeline.hset(NAMESPACES, self._names.short, f"{self._namespace.hex()} {time.time_ns() // 1_000_000}")
        pipeline.execute()
        self._snapshot_at = now
        self._counts["snapshots"] += 1


def _row_of(event: PrefixEvent) -> IndexRow:
    return IndexRow(event.position, event.tier)
