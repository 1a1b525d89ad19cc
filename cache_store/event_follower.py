"""Owns the reading end of the index: a thread that keeps a `PrefixIndex` up to date. Knows no router.

It starts from the rows and snapshots that lie ready and follows the stream from a place before all of them, so that no
event is lost between: one that they hold already changes nothing. An index is a hint: whoever uses a row still verifies
the object.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import redis

from warmstate.cache_store.event_applier import EventApplier
from warmstate.cache_store.events import decode_entry, decode_lost_segments
from warmstate.cache_store.index_loader import read_snapshots, scan_checkpoints
from warmstate.cache_store.known_paths import KnownPaths, decode_path
from warmstate.cache_store.names import index_names
from warmstate.cache_store.prefix_index import PrefixIndex
from warmstate.cache_store.redis_client import StoreAddress, open_client

# What RESP2 gives, where the client's types allow for every protocol version.
_Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes]]]
_Places: TypeAlias = dict[bytes | str | memoryview, int | bytes | str | memoryview]
_XreadReply: TypeAlias = list[tuple[bytes, _Entries]]

logger = logging.getLogger(__name__)

CHECK_PERIOD_S = 1.0
"""However many events come, so often is looked whether the stream is still the one that was read before."""

_START = "0-0"
_BATCH = 1000
_BLOCK_MS = 500
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 2.0


class EventFollower:
    """Follows one namespace until `close`. On the follower's thread `on_reset` is called when the stream was lost, and
    with it, most likely, all that the server held; `on_lost_segments` with the prefix keys whose KV segments the store
    no longer holds, `on_lost_checkpoint` with the prefix key and the position of a checkpoint that it no longer holds.
    `paths`, where given, is kept up to date too.
    """

    def __init__(
        self,
        address: StoreAddress,
        namespace: bytes,
        index: PrefixIndex,
        on_reset: Callable[[], None] = lambda: None,
        on_lost_segments: Callable[[Sequence[bytes]], None] = lambda keys: None,
        on_lost_checkpoint: Callable[[bytes, int], None] = lambda key, position: None,
        paths: KnownPaths | None = None,
    ) -> None:
        self._client = open_client(address, 1, timeout_s=_BLOCK_MS / 1000 + address.operation_timeout_s)
        self._names = index_names(namespace)
        self._applier = EventApplier(index)
        self._on_reset = on_reset
        self._on_lost_segments = on_lost_segments
        self._on_lost_checkpoint = on_lost_checkpoint
        self._paths = paths
        self._last_path_id = _START
        self._last_id: str | None = None
        self._seen_id: str | None = None
        names = ("events_read", "stream_resets", "follower_failures", "rows_loaded", "snapshots_unreadable")
        self._counts = dict.fromkeys(names, 0)
        self._caught_up = threading.Event()
        self._stopping = threading.Event()
        self._is_well = True
        self._thread = threading.Thread(target=self._run, name="warmstate-follower", daemon=True)
        self._thread.start()

    def wait_caught_up(self, timeout_s: float) -> bool:
        """Whether the end of the stream was reached, waiting for it at most `timeout_s`."""
        return self._caught_up.wait(timeout_s)

    def stats(self) -> dict[str, float]:
        """Counters since the start, whether the end of the stream is reached, replicas known in part only, and whether
        the thread runs."""
        counts = {name: float(value) for name, value in self._counts.items()}
        return {
            **counts,
            "event_gaps": float(self._applier.num_gaps),
            "replicas_incomplete": float(len(self._applier.incomplete())),
            "follower_caught_up": float(self._caught_up.is_set()),
            "follower_alive": float(self._is_well and self._thread.is_alive()),
        }

    def close(self) -> None:
        """Ends the thread; the index stays as it is."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._stopping.is_set():
            try:
                self._follow()
            except (redis.RedisError, OSError):
                self._counts["follower_failures"] += 1
            except Exception:
                # Whatever it was, to route without an index for ever is worse than to start over.
                if self._is_well:
                    logger.exception(
                        "the follower of %s has failed; it starts over until it can go on", self._names.short
                    )
                self._is_well = False
                self._counts["follower_failures"] += 1
            else:
                self._is_well = True
                retry_s = _FIRST_RETRY_S
                continue
            self._caught_up.clear()
            self._stopping.wait(retry_s)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)
        self._client.close()

    def _follow(self) -> None:
        """One look at the stream as a whole, and then at what comes."""
        if not self._is_well:
            self._start_over()
        self._check_stream()
        self._read(self._last_id if self._last_id is not None else self._load())
        self._complete_replicas()

    def _load(self) -> str:
        """Takes rows and snapshots, and gives the place in the stream behind which all lies that they may lack."""
        last = cast(_Entries, self._client.xrevrange(self._names.events, count=1))
        self._seen_id = last[0][0].decode() if last else None
        found = read_snapshots(self._client, self._names)
        self._counts["snapshots_unreadable"] += len(found.unreadable)
        rows = scan_checkpoints(self._client, self._names)
        self._applier.put_stored({key: row.position for key, row in rows.items()})
        for snapshot in found.snapshots.values():
            self._applier.take_snapshot(snapshot)
        self._counts["rows_loaded"] += len(rows) + sum(len(snapshot.rows) for snapshot in found.snapshots.values())
        if found.without or self._seen_id is None:
            return _START
        return min((self._seen_id, *(snapshot.stream_id for snapshot in found.snapshots.values())), key=_order)

    def _read(self, last_id: str) -> None:
        """Reads until the stream is idle, the connection fails, we are closed, or it is time to look at the stream."""
        self._last_id = last_id
        until = time.monotonic() + CHECK_PERIOD_S
        while not self._stopping.is_set() and time.monotonic() < until:
            # Who has not caught up must not wait for news to learn that there are none.
            block_ms = _BLOCK_MS if self._caught_up.is_set() else None
            reply = self._client.xread(self._places(self._last_id), count=_BATCH, block=block_ms)
            found = {name.decode(): entries for name, entries in cast(_XreadReply, reply or [])}
            self._take_paths(found.get(self._names.paths, []))
            entries = found.get(self._names.events, [])
            for entry_id, fields in entries:
                entry = decode_entry(fields)
                if entry is not None:
                    self._applier.apply(entry)
                    if entry.event.is_of_store and entry.event.op == "remove":
                        self._on_lost_checkpoint(entry.event.key, entry.event.position)
                elif lost := decode_lost_segments(fields):
                    self._on_lost_segments(lost)
                self._last_id = entry_id.decode()
                self._seen_id = self._seen_id or self._last_id
            self._counts["events_read"] += len(entries)
            if len(entries) < _BATCH:
                self._caught_up.set()
            if not entries:
                return

    def _places(self, last_id: str) -> _Places:
        """From where on to read which streams."""
        places: _Places = {self._names.events: last_id}
        if self._paths is not None:
            places[self._names.paths] = self._last_path_id
        return places

    def _take_paths(self, entries: _Entries) -> None:
        for entry_id, fields in entries:
            self._last_path_id = entry_id.decode()
            if self._paths is not None:
                self._paths.put(decode_path(fields))

    def _complete_replicas(self) -> None:
        """Looks for the snapshots of replicas of which entries are missing."""
        if not (incomplete := self._applier.incomplete()):
            return
        found = read_snapshots(self._client, self._names)
        for replica_id in incomplete:
            if replica_id in found.snapshots:
                self._applier.take_snapshot(found.snapshots[replica_id])
        self._applier.give_up(set(incomplete) - found.snapshots.keys() - found.without)

    def _check_stream(self) -> None:
        """Starts over when the stream no longer has what it had at the last look: it was deleted, and may be filled
        anew already, or was trimmed faster than it was read."""
        if self._last_id is None:
            return
        if self._seen_id is not None and not self._client.xrange(self._names.events, self._seen_id, self._seen_id):
            self._counts["stream_resets"] += 1
            self._start_over()
        elif self._last_id != _START and self._client.xrange(self._names.events, self._last_id, self._last_id):
            self._seen_id = self._last_id

    def _start_over(self) -> None:
        """Whoever may have missed something has missed it."""
        self._last_id = self._seen_id = None
        self._last_path_id = _START
        self._applier.reset()
        self._on_reset()


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(int(number) for number in entry_id.split("-"))
