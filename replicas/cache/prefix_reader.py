"""Owns the reading of whole prefixes from the shared store, and the measure of how long it takes. One event loop.

An object that two prefixes need at once is read once. Nothing of a prefix that did not come whole is handed out.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from warmstate.cache_store.keys import BLOCK_TOKENS, ObjectKey
from warmstate.cache_store.store import CheckpointStore, Hit, Miss, MissReason
from warmstate.models.backend import StateShapes
from warmstate.replicas.cache.estimates import HalfLife, TransferEstimate
from warmstate.replicas.cache.fetch_miss import FetchMiss
from warmstate.replicas.cache.known_objects import KnownObjects
from warmstate.replicas.cache.single_flight import SingleFlight
from warmstate.replicas.cache.state_codec import CheckpointBuffers, CheckpointNames, Parts, as_part, new_segment
from warmstate.replicas.histogram import SECONDS, Histogram

# Of one prefix. More would wait inside the store, and run there into the time limit of one operation.
_MAX_READS = 4
_HALF_LIFE = HalfLife(samples=4, seconds=10)
_ABOUT_THE_OBJECT = frozenset({MissReason.ABSENT, MissReason.CORRUPT, MissReason.LAYOUT})
_COUNTERS = (
    "fetch_hits",
    *(f"fetch_misses_{reason}" for reason in MissReason),
    "fetched_bytes",
    "fetch_objects_joined",
)


@dataclass(frozen=True, slots=True)
class FetchedPrefix:
    """The verified checkpoint at `position`, and the KV segments that were asked for, by their end. Read-only: parts
    may be shared with other prefixes that were fetched at the same time."""

    position: int
    buffers: CheckpointBuffers
    segments: dict[int, torch.Tensor]


class PrefixReader:
    """Reads for one replica. `timeout_s` tells how long so many bytes may take, and what a slow store may cost."""

    def __init__(
        self,
        store: CheckpointStore,
        names: CheckpointNames,
        known: KnownObjects,
        timeout_s: Callable[[int], float],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._names = names
        self._known = known
        self._timeout_s = timeout_s
        self._clock = clock
        self._checkpoints = SingleFlight[CheckpointBuffers | FetchMiss]()
        self._segments = SingleFlight[torch.Tensor | FetchMiss]()
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))
        self._seconds = Histogram(SECONDS)
        self._num_running = 0
        self.transfer = TransferEstimate(_HALF_LIFE)

    async def read(
        self,
        shapes: StateShapes,
        keys: Sequence[bytes],
        segment_stops: Sequence[int],
        num_bytes: int,
        expected_s: float,
    ) -> FetchedPrefix | FetchMiss:
        """The checkpoint at the last of `keys` with the KV segments that end at `segment_stops`, `num_bytes` in all.

        The first miss ends it. Takes at most `timeout_s` of the bytes, or twice `expected_s` where that is more.
        """
        started, num_others, joined = self._clock(), self._num_running, self._counts["fetch_objects_joined"]
        self._num_running += 1
        outcome: FetchedPrefix | FetchMiss = FetchMiss(MissReason.UNAVAILABLE)
        try:
            async with asyncio.timeout(max(self._timeout_s(num_bytes), 2 * expected_s)):
                outcome = await self._read(shapes, keys, segment_stops)
        except TimeoutError:
            outcome = FetchMiss(MissReason.TIMEOUT)
        finally:
            # Also where the store raised, which it must not.
            self._num_running -= 1
            self._count(outcome, self._clock() - started)
        has_joined = self._counts["fetch_objects_joined"] > joined
        if _is_measure(outcome) and not has_joined:
            now = self._clock()
            self.transfer.put(num_bytes, num_others, now - started, now)
        return outcome

    def stats(self) -> dict[str, float]:
        """Counters since the start, seconds per fetch, and the estimates once there was something to estimate from."""
        figures = {**{name: float(n) for name, n in self._counts.items()}, **self._seconds.as_dict("fetch_seconds")}
        rate = self.transfer.find()
        if rate is not None:
            figures |= {"bytes_per_s": rate.bytes_per_s, "latency_ms": 1e3 * rate.latency_s}
        return figures

    async def _read(
        self, shapes: StateShapes, keys: Sequence[bytes], segment_stops: Sequence[int]
    ) -> FetchedPrefix | FetchMiss:
        position = len(keys) * BLOCK_TOKENS
        window = asyncio.Semaphore(_MAX_READS)
        buffers = await self._read_checkpoint(shapes, keys[-1], position, window)
        if isinstance(buffers, FetchMiss):
            return buffers
        outcomes = await asyncio.gather(
            *(self._read_segment(shapes, self._names.segment(keys, stop), window) for stop in segment_stops)
        )
        segments: dict[int, torch.Tensor] = {}
        for stop, outcome in zip(segment_stops, outcomes, strict=True):
            if isinstance(outcome, FetchMiss):
                return outcome
            segments[stop] = outcome
        return FetchedPrefix(position, buffers, segments)

    async def _read_checkpoint(
        self, shapes: StateShapes, prefix_key: bytes, position: int, window: asyncio.Semaphore
    ) -> CheckpointBuffers | FetchMiss:
        groups = self._names.checkpoint(prefix_key, position)

        async def read() -> CheckpointBuffers | FetchMiss:
            buffers = CheckpointBuffers(shapes, position)
            reads = (self._read_object(key, buffers.parts(group), window) for group, key in enumerate(groups))
            misses = [miss for miss in await asyncio.gather(*reads) if miss is not None]
            return misses[0] if misses else buffers

        self._counts["fetch_objects_joined"] += len(groups) * self._checkpoints.is_running(prefix_key)
        return await self._checkpoints.join(prefix_key, read)

    async def _read_segment(
        self, shapes: StateShapes, key: ObjectKey, window: asyncio.Semaphore
    ) -> torch.Tensor | FetchMiss:
        async def read() -> torch.Tensor | FetchMiss:
            kv = new_segment(shapes)
            miss = await self._read_object(key, {"kv": as_part("kv", kv)}, window)
            return kv if miss is None else miss

        self._counts["fetch_objects_joined"] += self._segments.is_running(key)
        return await self._segments.join(key, read)

    async def _read_object(self, key: ObjectKey, into: Parts, window: asyncio.Semaphore) -> FetchMiss | None:
        async with window:
            outcome = await self._store.get(key, into)
        if isinstance(outcome, Hit):
            # For how long it stays was not seen. KV is renewed by whoever publishes over it, a checkpoint by nobody.
            if key.kind == "kv":
                self._known.put(key)
            self._counts["fetched_bytes"] += outcome.num_bytes
            return None
        return self._missed(key, outcome)

    def _missed(self, key: ObjectKey, miss: Miss) -> FetchMiss:
        if miss.reason not in _ABOUT_THE_OBJECT:
            return FetchMiss(miss.reason)
        self._known.remove(key)
        return FetchMiss(miss.reason, key, miss.part)

    def _count(self, outcome: FetchedPrefix | FetchMiss, seconds: float) -> None:
        self._counts[f"fetch_misses_{outcome.reason}" if isinstance(outcome, FetchMiss) else "fetch_hits"] += 1
        self._seconds.observe(seconds)


def _is_measure(outcome: FetchedPrefix | FetchMiss) -> bool:
    """Whether the time taken says something about moving all the bytes: it came, or was still on its way at the end."""
    return isinstance(outcome, FetchedPrefix) or outcome.reason is MissReason.TIMEOUT
