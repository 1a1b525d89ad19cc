"""Owns the reading end of the event stream: a thread that keeps a `PrefixIndex` up to date. Knows no router.

A replica's rows are dropped when its entries show a gap or a new epoch; all rows that came from the stream are dropped
when it is another one than before, as after a restart of the server. An index is a hint: whoever uses a row still
verifies the object.
"""

import threading
from collections.abc import Callable
from typing import TypeAlias, cast

import redis

from warmstate.cache_store.events import EventEntry, decode_entry
from warmstate.cache_store.names import events_name
from warmstate.cache_store.prefix_index import STORE_HOLDER, IndexRow, PrefixIndex
from warmstate.cache_store.redis_client import StoreAddress, open_client

# What RESP2 gives, where the client's types allow for every protocol version.
_Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes]]]
_XreadReply: TypeAlias = list[tuple[bytes, _Entries]]

_START = "0-0"
_BATCH = 1000
_BLOCK_MS = 500
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 2.0


class EventFollower:
    """Follows the stream of one namespace from its beginning, until `close`. `on_reset` is called on the follower's
    thread when the stream was lost, and with it, most likely, all that the server held.

    Epochs of a replica must grow from one life to the next: entries of an older epoch than the newest are ignored.
    """

    def __init__(
        self,
        address: StoreAddress,
        namespace: bytes,
        index: PrefixIndex,
        on_reset: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = open_client(address, 1, timeout_s=_BLOCK_MS / 1000 + address.operation_timeout_s)
        self._stream = events_name(namespace)
        self._index = index
        self._on_reset = on_reset
        self._last_id = _START
        self._last_of: dict[str, tuple[int, int]] = {}
        self._counts = {"events_read": 0, "event_gaps": 0, "stream_resets": 0, "follower_failures": 0}
        self._caught_up = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warmstate-follower", daemon=True)
        self._thread.start()

    def wait_caught_up(self, timeout_s: float) -> bool:
        """Whether the end of the stream was reached, waiting for it at most `timeout_s`."""
        return self._caught_up.wait(timeout_s)

    def stats(self) -> dict[str, float]:
        connected = {"follower_caught_up": float(self._caught_up.is_set())}
        return {**{name: float(value) for name, value in self._counts.items()}, **connected}

    def close(self) -> None:
        """Ends the thread; the index stays as it is."""
        self._stopping.set()
        self._thread.join()

    def apply(self, entry: EventEntry) -> None:
        """Takes one entry into the index; the thread calls this for each."""
        if not self._is_next(entry):
            return
        event = entry.event
        if event.op == "add":
            self._index.insert(event.key, entry.holder, IndexRow(event.position, event.tier))
        else:
            self._index.remove(event.key, entry.holder)

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._stopping.is_set():
            try:
                self._check_stream()
                self._read()
                retry_s = _FIRST_RETRY_S
            except (redis.RedisError, OSError):
                self._counts["follower_failures"] += 1
                self._caught_up.clear()
                self._stopping.wait(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
        self._client.close()

    def _read(self) -> None:
        """Reads until the stream is idle, the connection fails or we are closed."""
        while not self._stopping.is_set():
            reply = self._client.xread({self._stream: self._last_id}, count=_BATCH, block=_BLOCK_MS)
            entries = cast(_XreadReply, reply)[0][1] if reply else []
            for entry_id, fields in entries:
                entry = decode_entry(fields)
                if entry is not None:
                    self.apply(entry)
                self._last_id = entry_id.decode()
            self._counts["events_read"] += len(entries)
            if len(entries) < _BATCH:
                self._caught_up.set()
            if not entries:
                return

    def _check_stream(self) -> None:
        """Starts over when the stream no longer has the place where we stopped reading."""
        if self._last_id == _START:
            return
        first = cast(_Entries, self._client.xrange(self._stream, count=1))
        last = cast(_Entries, self._client.xrevrange(self._stream, count=1))
        if first and last and _order(first[0][0]) <= _order(self._last_id.encode()) <= _order(last[0][0]):
            return
        self._counts["stream_resets"] += 1
        self._last_id = _START
        # Not all of the index: followers of other namespaces may share it.
        for holder in (STORE_HOLDER, *self._last_of):
            self._index.drop_holder(holder)
        self._last_of.clear()
        self._on_reset()

    def _is_next(self, entry: EventEntry) -> bool:
        """Sorts out repeated and outlived entries, and drops a replica's rows where some of its entries are missing."""
        known = self._last_of.get(entry.replica_id)
        place = (entry.epoch, entry.seq)
        if known is not None and place <= known:
            return False
        if known is not None and place != (known[0], known[1] + 1):
            self._counts["event_gaps"] += entry.epoch == known[0]
            self._index.drop_holder(entry.replica_id)
        self._last_of[entry.replica_id] = place
        return True


def _order(entry_id: bytes) -> tuple[int, ...]:
    return tuple(int(number) for number in entry_id.split(b"-"))
