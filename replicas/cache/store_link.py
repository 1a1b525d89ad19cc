"""Owns the traffic between a replica and the shared store: whole prefixes fetched and published in the background.

Called from the engine thread, works on the event loop. A failure is one counted miss or drop, and never an exception.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS, ObjectKey
from warmstate.cache_store.store import CheckpointStore, Dropped, DropReason, Exists, MissReason, Stored
from warmstate.models.backend import StateShapes
from warmstate.replicas.cache.estimates import TransferRate
from warmstate.replicas.cache.fetch_miss import FetchMiss
from warmstate.replicas.cache.known_objects import KnownObjects
from warmstate.replicas.cache.prefix_reader import FetchedPrefix, PrefixReader
from warmstate.replicas.cache.publication import Publication
from warmstate.replicas.cache.single_flight import SingleFlight
from warmstate.replicas.cache.state_codec import CheckpointNames, Parts
from warmstate.replicas.histogram import SECONDS, Histogram

_LOG = logging.getLogger(__name__)

MAX_IN_FLIGHT_BYTES = 512 << 20
_COUNTERS = ("published", *(f"publish_dropped_{reason}" for reason in DropReason))


class StoreDirectory(Protocol):
    """Which prefixes the shared store holds, as far as this replica knows; thread-safe, never waits for a server."""

    def find_positions(self, keys: Sequence[bytes]) -> list[int]:
        """The positions among block boundaries `keys` that the store can serve, the shallowest first."""
        ...

    def count_known(self, keys: Sequence[bytes]) -> int:
        """How many tokens of the path `keys` lie on the way to something that any replica has put into the store."""
        ...

    def put(self, publication: Publication) -> None:
        """Tells every replica that the store serves this prefix now."""
        ...

    def count_hit(self, key: bytes) -> None:
        """The checkpoint of this prefix was fetched and used."""
        ...

    def remove(self, key: bytes, position: int) -> None:
        """Tells every replica that the store no longer serves this prefix."""
        ...

    def tell_lost_segment(self, key: bytes) -> None:
        """Tells every replica that the store no longer holds the KV segment of this prefix key."""
        ...


class StoreLink:
    """Fetches and publishes for one replica. `timeout_s` tells how long a whole fetch of so many bytes may take; the
    store keeps for `ttl_s` what nothing else is said of."""

    def __init__(
        self,
        store: CheckpointStore,
        directory: StoreDirectory,
        names: CheckpointNames,
        loop: asyncio.AbstractEventLoop,
        timeout_s: Callable[[int], float],
        max_publish_bytes: int = MAX_IN_FLIGHT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: int = 86_400,
    ) -> None:
        self._store = store
        self._directory = directory
        self._names = names
        self._loop = loop
        self._max_publish_bytes = max_publish_bytes
        self.clock = clock
        self._known = KnownObjects(ttl_s, clock)
        self._reader = PrefixReader(store, names, self._known, timeout_s, clock)
        self._puts = SingleFlight[Stored | Exists | Dropped]()
        self._lock = Lock()
        self._pending: set[Future[None]] = set()
        self._publish_bytes = 0
        self._publishing: set[bytes] = set()
        self._publish_seconds = Histogram(SECONDS)
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))

    @property
    def transfer_rate(self) -> TransferRate | None:
        """How fast fetches have been lately; None before the first."""
        return self._reader.transfer.find()

    def find_positions(self, keys: Sequence[bytes]) -> list[int]:
        return self._directory.find_positions(keys)

    def count_known(self, keys: Sequence[bytes]) -> int:
        return self._directory.count_known(keys)

    def lacks(self, key: ObjectKey) -> bool:
        """Whether this replica has not lately seen the object in the store."""
        return not self._known.has(key)

    def forget_stored(self) -> None:
        """The store has lost what it held; from any thread."""
        self._known.clear()

    def forget_segments(self, prefix_keys: Sequence[bytes]) -> None:
        """The store no longer holds these KV segments, so that they must be put again; from any thread."""
        self._known.remove_segments(prefix_keys)

    def forget_checkpoint(self, prefix_key: bytes, position: int) -> None:
        """The store no longer holds this checkpoint; from any thread."""
        for key in self._names.checkpoint(prefix_key, position):
            self._known.remove(key)

    def fetch(
        self,
        shapes: StateShapes,
        keys: Sequence[bytes],
        segment_stops: Sequence[int],
        num_bytes: int,
        done: Callable[[FetchedPrefix | FetchMiss], None],
        expected_s: float = 0.0,
    ) -> None:
        """Fetches the checkpoint at the last of `keys`, with the KV segments that end at `segment_stops`.

        `done` is called on the event loop, once.
        """
        self._start(self._fetch(shapes, keys, segment_stops, num_bytes, done, expected_s))

    def take(self, num_bytes: int) -> bool:
        """Takes bytes of what publications may hold, for one that is being made; a no is counted as a drop."""
        with self._lock:
            fits = self._publish_bytes + num_bytes <= self._max_publish_bytes
            self._counts[f"publish_dropped_{DropReason.NO_ROOM}"] += not fits
            self._publish_bytes += num_bytes if fits else 0
        return fits

    def give_back(self, num_bytes: int) -> None:
        """Ends what `take` began."""
        with self._lock:
            self._publish_bytes -= num_bytes

    def publish(self, publication: Publication) -> None:
        """Sends a checkpoint in the background, unless it is on its way; drops it, counted, when too much else is."""
        if publication.prefix_key not in self._publishing and self.take(publication.held_bytes):
            self.publish_taken(publication, publication.held_bytes)

    def publish_taken(self, publication: Publication, taken_bytes: int) -> None:
        """The same for one whose bytes `take` has taken; they are given back at its end."""
        with self._lock:
            self._publishing.add(publication.prefix_key)
        self._start(self._publish(publication, taken_bytes))

    async def drain(self) -> None:
        """Waits until everything that was started has ended."""
        while pending := list(self._pending):
            await asyncio.wait([asyncio.wrap_future(future) for future in pending])

    async def close(self, timeout_s: float) -> None:
        """Lets what was started end within `timeout_s`, and gives up the rest."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.drain(), timeout_s)
        for future in list(self._pending):
            future.cancel()

    def stats(self) -> dict[str, float]:
        """Counters since the start, bytes on their way to the store now, seconds per transfer, and estimates."""
        with self._lock:
            counts = {name: float(n) for name, n in self._counts.items()}
            now = {"publish_bytes": float(self._publish_bytes)}
        return {**counts, **now, **self._publish_seconds.as_dict("publish_seconds"), **self._reader.stats()}

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._pending.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[None]) -> None:
        self._pending.discard(future)
        if not future.cancelled() and (fault := future.exception()) is not None:
            _LOG.error("the store raised, which it must not", exc_info=fault)

    async def _fetch(
        self,
        shapes: StateShapes,
        keys: Sequence[bytes],
        segment_stops: Sequence[int],
        num_bytes: int,
        done: Callable[[FetchedPrefix | FetchMiss], None],
        expected_s: float,
    ) -> None:
        outcome: FetchedPrefix | FetchMiss = FetchMiss(MissReason.UNAVAILABLE)
        try:
            outcome = await self._reader.read(shapes, keys, segment_stops, num_bytes, expected_s)
            if isinstance(outcome, FetchMiss) and outcome.key is not None:
                self._unlearn(outcome.key, keys)
            if isinstance(outcome, FetchedPrefix):
                self._directory.count_hit(keys[-1])
        finally:
            # Whatever a store may raise, a sequence waits for this.
            done(outcome)

    def _unlearn(self, key: ObjectKey, keys: Sequence[bytes]) -> None:
        """An object that is gone makes every deeper prefix on this path unusable. A lost segment is told first: who
        hears that a prefix is gone may put it again at once."""
        if key.kind == "kv":
            self._directory.tell_lost_segment(key.prefix)
        for index in range(key.position // BLOCK_TOKENS - 1, len(keys)):
            self._directory.remove(keys[index], (index + 1) * BLOCK_TOKENS)

    async def _publish(self, publication: Publication, taken_bytes: int) -> None:
        started = self.clock()
        try:
            prepared = await self._prepare(publication)
            outcome = prepared if isinstance(prepared, Dropped) else await self._put_all(prepared)
            if isinstance(outcome, Dropped):
                self._count(f"publish_dropped_{outcome.reason}")
                return
            self._directory.put(outcome)
            self._count("published")
            self._publish_seconds.observe(self.clock() - started)
        finally:
            with self._lock:
                self._publishing.discard(publication.prefix_key)
            self.give_back(taken_bytes)

    async def _prepare(self, publication: Publication) -> Publication | Dropped:
        """The publication with what the store has lost of the KV that it needs; the rest lives as long as it."""
        own = {*publication.lacking, *(key for key, _ in publication.objects)}
        stops = range(SEGMENT_TOKENS, publication.position + 1, SEGMENT_TOKENS)
        needed = [key for stop in stops if (key := self._names.segment(publication.path, stop)) not in own]
        ready = await self._store.prepare(needed, publication.num_bytes, publication.ttl_s)
        if isinstance(ready, Dropped):
            return ready
        for key in ready.lost:
            self._known.remove(key)
            self._directory.tell_lost_segment(key.prefix)
        lacking = sorted((*ready.lost, *publication.lacking), key=lambda key: key.position)
        return replace(publication, lacking=tuple(lacking))

    async def _put_all(self, publication: Publication) -> Publication | Dropped:
        """Puts all, one after the other; where not all of it comes to be there, none is taken for there, as no row will
        name it."""
        finds = ((key, publication.find(key)) for key in publication.lacking)
        for key, parts in itertools.chain(finds, publication.objects):
            if parts is None:
                outcome: Stored | Exists | Dropped = Dropped(
                    DropReason.LOST_KV, "KV is neither there nor here any more"
                )
            else:
                outcome = await self._put(key, parts, publication.ttl_s)
            if isinstance(outcome, Dropped):
                for each in (*publication.lacking, *(key for key, _ in publication.objects)):
                    self._known.remove(each)
                return outcome
            # A checkpoint that is there for a short time must be asked for again by whoever wants it longer.
            if key.kind == "kv" or publication.ttl_s is None:
                self._known.put(key, publication.ttl_s)
        return publication

    async def _put(self, key: ObjectKey, parts: Parts, ttl_s: int | None) -> Stored | Exists | Dropped:
        """Two checkpoints that share KV may be on their way at once: it is sent once, and both wait for it."""
        return await self._puts.join((key, ttl_s), lambda: self._store.put(key, parts, ttl_s))

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1
