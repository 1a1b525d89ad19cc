"""Owns the traffic between a replica and the shared store: whole prefixes fetched and published in the background.

Called from the engine thread, works on the event loop. A failure is one counted miss or drop, and never an exception.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import torch

from warmstate.cache_store.keys import BLOCK_TOKENS, ObjectKey
from warmstate.cache_store.store import CheckpointStore, Dropped, DropReason, Hit, Miss, MissReason
from warmstate.models.backend import StateShapes
from warmstate.replicas.cache.state_codec import CheckpointBuffers, CheckpointNames, Parts, as_part, new_segment

_LOG = logging.getLogger(__name__)

MAX_PUBLISH_BYTES = 512 << 20
_MAX_KNOWN_OBJECTS = 200_000
_KNOWN_FOR_S = 600.0
_COUNTERS = (
    "fetch_hits",
    *(f"fetch_misses_{reason}" for reason in MissReason),
    "fetched_bytes",
    "published",
    *(f"publish_dropped_{reason}" for reason in DropReason),
)
_ABOUT_THE_OBJECT = frozenset({MissReason.ABSENT, MissReason.CORRUPT, MissReason.LAYOUT})


class StoreDirectory(Protocol):
    """Which prefixes the shared store holds, as far as this replica knows; thread-safe, never waits for a server."""

    def find_deepest(self, keys: Sequence[bytes]) -> int:
        """The deepest position among block boundaries `keys` that the store can serve; 0 when none."""
        ...

    def put(self, key: bytes, position: int) -> None:
        """Tells every replica that the store serves this prefix now."""
        ...

    def remove(self, key: bytes, position: int) -> None:
        """Tells every replica that the store no longer serves this prefix."""
        ...


@dataclass(frozen=True, slots=True)
class FetchedPrefix:
    """The verified checkpoint at `position`, and the KV segments that were asked for, by their end."""

    position: int
    buffers: CheckpointBuffers
    segments: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Publication:
    """A checkpoint to publish: its objects in the order of writing, KV first, so that it is whole once it is seen."""

    prefix_key: bytes
    position: int
    objects: tuple[tuple[ObjectKey, Parts], ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.spec.num_bytes for _, parts in self.objects for part in parts.values())


class StoreLink:
    """Fetches and publishes for one replica. `timeout_s` bounds a whole fetch: what a slow store may cost a request."""

    def __init__(
        self,
        store: CheckpointStore,
        directory: StoreDirectory,
        names: CheckpointNames,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        max_publish_bytes: int = MAX_PUBLISH_BYTES,
    ) -> None:
        self._store = store
        self._directory = directory
        self._names = names
        self._loop = loop
        self._timeout_s = timeout_s
        self._max_publish_bytes = max_publish_bytes
        self._lock = Lock()
        self._known_since: OrderedDict[ObjectKey, float] = OrderedDict()
        self._pending: set[Future[None]] = set()
        self._publish_bytes = 0
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))

    def find_deepest(self, keys: Sequence[bytes]) -> int:
        return self._directory.find_deepest(keys)

    def lacks(self, key: ObjectKey) -> bool:
        """Whether this replica has not lately seen the object in the store.

        Knowledge grows old because servers evict, expire and restart; a `put` of what is there costs one round trip
        and renews its time to live.
        """
        with self._lock:
            since = self._known_since.get(key)
        return since is None or time.monotonic() - since > _KNOWN_FOR_S

    def forget_stored(self) -> None:
        """The store has lost what it held; from any thread."""
        with self._lock:
            self._known_since.clear()

    def fetch(
        self,
        shapes: StateShapes,
        keys: Sequence[bytes],
        segment_stops: Sequence[int],
        done: Callable[[FetchedPrefix | None], None],
    ) -> None:
        """Fetches the checkpoint at the last of `keys`, with the KV segments that end at `segment_stops`.

        `done` is called on the event loop, once, with None for a miss.
        """
        fetched = FetchedPrefix(
            len(keys) * BLOCK_TOKENS,
            CheckpointBuffers(shapes, len(keys) * BLOCK_TOKENS),
            {stop: new_segment(shapes) for stop in segment_stops},
        )
        self._start(self._fetch(fetched, keys, done))

    def publish(self, publication: Publication) -> None:
        """Sends a checkpoint in the background; drops it, counted, when too much is on its way already."""
        with self._lock:
            if self._publish_bytes + publication.num_bytes > self._max_publish_bytes:
                self._counts[f"publish_dropped_{DropReason.NO_ROOM}"] += 1
                return
            self._publish_bytes += publication.num_bytes
        self._start(self._publish(publication))

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
        """Counters since the start, and bytes on their way to the store now."""
        with self._lock:
            return {**{name: float(n) for name, n in self._counts.items()}, "publish_bytes": float(self._publish_bytes)}

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._pending.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[None]) -> None:
        self._pending.discard(future)
        if not future.cancelled() and (fault := future.exception()) is not None:
            _LOG.error("the store raised, which it must not", exc_info=fault)

    async def _fetch(
        self, fetched: FetchedPrefix, keys: Sequence[bytes], done: Callable[[FetchedPrefix | None], None]
    ) -> None:
        miss: Miss | None = Miss(MissReason.UNAVAILABLE)
        try:
            async with asyncio.timeout(self._timeout_s):
                miss = await self._fill(fetched, keys)
        except TimeoutError:
            miss = Miss(MissReason.TIMEOUT)
        finally:
            # Whatever a store may raise, a sequence waits for this.
            self._count("fetch_hits" if miss is None else f"fetch_misses_{miss.reason}")
            done(fetched if miss is None else None)

    async def _fill(self, fetched: FetchedPrefix, keys: Sequence[bytes]) -> Miss | None:
        """Reads the checkpoint, then its KV; the first miss ends it and corrects the directory."""
        groups = self._names.checkpoint(keys[-1], fetched.position)
        wanted = {key: fetched.buffers.parts(group) for group, key in enumerate(groups)}
        segments = {self._names.segment(keys, stop): {"kv": as_part("kv", kv)} for stop, kv in fetched.segments.items()}
        for batch in (wanted, segments):
            outcomes = await asyncio.gather(*(self._store.get(key, into) for key, into in batch.items()))
            for key, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, Hit):
                    self._learn(key)
                    self._count("fetched_bytes", outcome.num_bytes)
                else:
                    self._unlearn(key, outcome, keys)
                    return outcome
        return None

    def _unlearn(self, key: ObjectKey, miss: Miss, keys: Sequence[bytes]) -> None:
        """An object that is gone makes every deeper prefix on this path unusable."""
        if miss.reason not in _ABOUT_THE_OBJECT:
            return
        with self._lock:
            self._known_since.pop(key, None)
        for index in range(key.position // BLOCK_TOKENS - 1, len(keys)):
            self._directory.remove(keys[index], (index + 1) * BLOCK_TOKENS)

    async def _publish(self, publication: Publication) -> None:
        try:
            for key, parts in publication.objects:
                outcome = await self._store.put(key, parts)
                if isinstance(outcome, Dropped):
                    self._count(f"publish_dropped_{outcome.reason}")
                    return
                self._learn(key)
            self._directory.put(publication.prefix_key, publication.position)
            self._count("published")
        finally:
            with self._lock:
                self._publish_bytes -= publication.num_bytes

    def _learn(self, key: ObjectKey) -> None:
        with self._lock:
            self._known_since[key] = time.monotonic()
            self._known_since.move_to_end(key)
            if len(self._known_since) > _MAX_KNOWN_OBJECTS:
                self._known_since.popitem(last=False)

    def _count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount
