"""Owns a replica's end of the event stream: it sends what the replica tells, in order, and survives the server.

Knows neither who reads nor why a prefix became usable.
"""

import threading
from collections import OrderedDict, deque

import redis
from redis.typing import EncodableT, FieldT

from warmstate.cache_store.events import EventEntry, PrefixEvent
from warmstate.cache_store.names import events_name
from warmstate.cache_store.redis_client import StoreAddress, open_client

STREAM_MAX_ENTRIES = 100_000

_BATCH = 256
_MAX_WAITING = 10_000
_MAX_LIVE_ROWS = 50_000
_RETRY_S = 0.5
_LOOK_PERIOD_S = 1.0
_CLOSE_TIMEOUT_S = 3.0


class EventLog:
    """One replica's writer. `append` never blocks: a thread of its own sends, and tries again while the server is
    away. When the stream has lost our entries, everything this replica can serve is told again, also by one that has
    nothing new to tell: the client library hides that it has connected anew."""

    def __init__(self, address: StoreAddress, namespace: bytes, replica_id: str, epoch: int) -> None:
        self._client = open_client(address, max_connections=1)
        self._stream = events_name(namespace)
        self._replica_id = replica_id
        self._epoch = epoch
        self._wake = threading.Condition()
        self._waiting: deque[PrefixEvent] = deque()
        self._live: OrderedDict[bytes, PrefixEvent] = OrderedDict()
        self._next_seq = 0
        self._num_lost = 0
        self._num_sent = 0
        self._last_id: bytes | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="warmstate-events", daemon=True)
        self._thread.start()

    def append(self, event: PrefixEvent) -> None:
        """Queues one event. Beyond the queue's limit the oldest is lost, and readers will see the gap."""
        with self._wake:
            self._remember(event)
            self._waiting.append(event)
            if len(self._waiting) > _MAX_WAITING:
                self._waiting.popleft()
                self._next_seq += 1
                self._num_lost += 1
            self._wake.notify()

    def stats(self) -> dict[str, float]:
        with self._wake:
            return {
                "events_sent": float(self._num_sent),
                "events_lost": float(self._num_lost),
                "events_waiting": float(len(self._waiting)),
            }

    def close(self) -> None:
        """Sends what waits, as far as the server takes it at once, and ends the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _remember(self, event: PrefixEvent) -> None:
        """Keeps what must be told again to a server that lost it; what the server itself held is lost with it."""
        if event.is_of_store:
            return
        if event.op == "remove":
            self._live.pop(event.key, None)
            return
        self._live[event.key] = event
        self._live.move_to_end(event.key)
        if len(self._live) > _MAX_LIVE_ROWS:
            self._live.popitem(last=False)

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            if self._send(batch):
                continue
            with self._wake:
                if self._closed:
                    break
                self._wake.wait_for(lambda: self._closed, _RETRY_S)
        self._client.close()

    def _next_batch(self) -> list[EventEntry] | None:
        """Waits for events; they stay queued until they are sent. Empty when it is time to look after the stream, None
        when closed and nothing waits."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closed, _LOOK_PERIOD_S)
            if not self._waiting:
                return None if self._closed else []
            events = [self._waiting[index] for index in range(min(_BATCH, len(self._waiting)))]
            first = self._next_seq
            return [self._entry(first + index, event) for index, event in enumerate(events)]

    def _entry(self, seq: int, event: PrefixEvent) -> EventEntry:
        return EventEntry(self._replica_id, self._epoch, seq, event)

    def _send(self, batch: list[EventEntry]) -> bool:
        """Looks for our last entry and adds the batch in one transaction, so that no restart falls between the two."""
        last_id = self._last_id
        pipeline = self._client.pipeline(transaction=True)
        if last_id is not None:
            pipeline.xrange(self._stream, last_id, last_id, count=1)
        for entry in batch:
            fields: dict[FieldT, EncodableT] = dict(entry.encode().items())
            pipeline.xadd(self._stream, fields, maxlen=STREAM_MAX_ENTRIES, approximate=True)
        try:
            replies = pipeline.execute()
        except (redis.RedisError, OSError):
            return False
        if batch:
            self._last_id = replies[-1]
            self._drop_sent(batch)
        if last_id is not None and not replies[0]:
            self._tell_all_again()
        return True

    def _drop_sent(self, batch: list[EventEntry]) -> None:
        """While the batch was under way the queue may have lost its oldest events: those were sent all the same."""
        with self._wake:
            end = batch[-1].seq + 1
            for _ in range(max(0, end - self._next_seq)):
                self._waiting.popleft()
            self._next_seq = max(self._next_seq, end)
            self._num_sent += len(batch)

    def _tell_all_again(self) -> None:
        """Puts the live rows before what waits; the gap in `seq` makes readers forget this replica's older rows."""
        with self._wake:
            waiting = {event.key for event in self._waiting}
            self._waiting.extendleft(event for key, event in reversed(self._live.items()) if key not in waiting)
            self._next_seq += 1
            self._last_id = None
