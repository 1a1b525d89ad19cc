"""Owns which prefix a sequence starts from, and who waits for whom. Engine thread only.

A prefix is usable where its KV, its recurrent and its conv state are all there, and nowhere else. KV is resident in
device blocks or lies in the host tier; states lie in the host tier; the shared store holds both.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Keys
from dataclasses import replace

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS
from warmstate.models.backend import ModelBackend, SequenceState
from warmstate.replicas.cache.host_tier import HostTier
from warmstate.replicas.cache.keeper import CheckpointKeeper
from warmstate.replicas.cache.parking import ParkingArea
from warmstate.replicas.cache.placement import last_usable_boundary
from warmstate.replicas.cache.state_codec import (
    CheckpointBuffers,
    CheckpointNames,
    as_part,
    floor_to_segment,
)
from warmstate.replicas.cache.store_link import FetchedPrefix, StoreLink
from warmstate.replicas.cache.twins import PendingPrefixes
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.messages import CacheSource
from warmstate.replicas.scheduler import PrefixMatch
from warmstate.replicas.sequence import KvSpan, LoadedPrefix, Sequence, SequenceStatus

_COUNTERS = (
    *(f"restores_{source}" for source in ("device", "host", "store", "parked")),
    *(f"restored_tokens_{source}" for source in ("device", "host", "store")),
    "twin_waits",
)

Post = Callable[[Callable[[], None]], None]
"""Hands work to the engine thread, from any thread."""


class HybridCache:
    """The scheduler's `PrefixSource`, and the keeper of the checkpoints that steps hand out."""

    def __init__(
        self,
        backend: ModelBackend,
        blocks: BlockPool,
        host: HostTier,
        parking: ParkingArea,
        names: CheckpointNames,
        post: Post,
        link: StoreLink | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self._backend = backend
        self._shapes = backend.shapes
        self._blocks = blocks
        self._host = host
        self._parking = parking
        self._names = names
        self._post = post
        self._link = link
        self._keeper = CheckpointKeeper(backend, host, names, link)
        self._enabled = enabled
        self._pending = PendingPrefixes()
        self._fetching: dict[Sequence, int] = {}
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))

    def find(self, sequence: Sequence) -> PrefixMatch | None:
        """The deepest usable prefix; None while it is being fetched, or computed by a twin."""
        parked = self._parking.find(sequence)
        if parked is not None:
            return PrefixMatch(parked.position)
        if not self._enabled:
            return PrefixMatch(0)
        keys = sequence.prefix_keys[: last_usable_boundary(sequence.num_tokens) // BLOCK_TOKENS]
        num_resident = self._blocks.count_resident(keys)
        position = self._host.find(keys, num_resident)
        if sequence.fetched is not None:
            position = max(position, sequence.fetched.position)
        # Whoever waits promises nothing, so that no two sequences can wait for each other.
        self._pending.withdraw(sequence)
        if self._must_wait(sequence, keys, position):
            return None
        for checkpoint in sequence.checkpoints:
            if checkpoint > position:
                self._pending.put(sequence, keys[checkpoint // BLOCK_TOKENS - 1])
        return PrefixMatch(position, min(num_resident, position // BLOCK_TOKENS))

    def load(self, sequence: Sequence, match: PrefixMatch) -> LoadedPrefix | None:
        """The state and the KV beside the resident blocks; None, and never found again, where a part is gone."""
        parked = self._parking.take(sequence)
        if parked is not None:
            self._counts["restores_parked"] += 1
            return parked
        start = match.num_resident_blocks * BLOCK_TOKENS
        keys = sequence.prefix_keys[: match.position // BLOCK_TOKENS]
        fetched, sequence.fetched = sequence.fetched, None
        if fetched is not None and fetched.position == match.position:
            loaded = self._complete(fetched, keys, start)
        else:
            loaded = self._load_local(keys, start)
        if loaded is not None:
            self._counts[f"restores_{loaded.source}"] += 1
            self._counts[f"restored_tokens_{loaded.source}"] += match.position
        return loaded

    def park(self, sequence: Sequence) -> None:
        self._pending.withdraw(sequence)
        self._parking.put(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Lets go of everything kept for a sequence that has ended."""
        self._pending.withdraw(sequence)
        self._parking.take(sequence)

    def keep(self, sequence: Sequence, state: SequenceState) -> bool:
        """Keeps and publishes a checkpoint of a committed step; False, and nothing, if it is not finite."""
        prefix_key = sequence.find_key(state.position)
        if not self._enabled or prefix_key is None:
            return True
        if not self._keeper.keep(sequence, state, prefix_key):
            return False
        self._pending.keep(sequence, prefix_key)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is kept for any living sequence."""
        return self._pending.is_empty and self._parking.num_bytes == 0

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what the host tier and the parking area hold now."""
        host = {f"host_{name}": value for name, value in self._host.stats().items()}
        parked = {"parked_bytes": float(self._parking.num_bytes), "parking_refused": float(self._parking.num_refused)}
        kept = {"checkpoints_kept": float(self._keeper.num_kept)}
        link = {f"store_{name}": value for name, value in self._link.stats().items()} if self._link else {}
        return {**{name: float(count) for name, count in self._counts.items()}, **kept, **host, **parked, **link}

    def _must_wait(self, sequence: Sequence, keys: Keys[bytes], position: int) -> bool:
        """Waits for a twin that will make a prefix usable beyond `position`, or starts a fetch from the store."""
        stored = 0 if self._link is None or sequence.was_fetched else self._link.find_deepest(keys)
        leader = self._pending.find_leader(sequence, keys, max(position, stored - BLOCK_TOKENS))
        # One leader per sequence: a burst of twins whose checkpoint cannot be kept must not run one after another.
        if leader is not None and sequence.twin_leader in (None, leader.arrival):
            self._counts["twin_waits"] += sequence.twin_leader is None
            sequence.twin_leader = leader.arrival
            return True
        if stored > position:
            if self._has_room_to_fetch(stored):
                self._fetch(sequence, keys[: stored // BLOCK_TOKENS])
            return True
        return False

    def _has_room_to_fetch(self, num_tokens: int) -> bool:
        """No more is on its way than could run here: a long queue would fill the host's memory, and the store's pipe
        until everything in it was late."""
        max_tokens = self._blocks.capacity * BLOCK_TOKENS
        is_full = len(self._fetching) >= self._backend.limits.num_slots
        return not self._fetching or not (is_full or sum(self._fetching.values()) + num_tokens > max_tokens)

    def _fetch(self, sequence: Sequence, keys: Keys[bytes]) -> None:
        """Starts the one fetch of a sequence; others with this prefix wait for it."""
        assert self._link is not None, "a fetch needs a store"
        sequence.was_fetched = True
        sequence.status = SequenceStatus.FETCHING
        self._pending.put(sequence, keys[-1])
        self._fetching[sequence] = position = len(keys) * BLOCK_TOKENS
        missing = self._host.missing_segments(keys, self._blocks.count_resident(keys), position)
        self._link.fetch(
            self._shapes, keys, missing, lambda fetched: self._post(lambda: self._take_fetched(sequence, fetched))
        )

    def _take_fetched(self, sequence: Sequence, fetched: FetchedPrefix | None) -> None:
        """Ends the wait of a sequence, which may have been cancelled meanwhile."""
        del self._fetching[sequence]
        self._pending.withdraw(sequence)
        if fetched is not None:
            self._put_fetched(sequence.prefix_keys[: fetched.position // BLOCK_TOKENS], fetched)
        if sequence.status is not SequenceStatus.FETCHING:
            return
        sequence.status = SequenceStatus.WAITING
        if fetched is not None:
            spans = [KvSpan(stop - SEGMENT_TOKENS, stop, kv) for stop, kv in fetched.segments.items()]
            spans += _tail_span(fetched.buffers, fetched.position)
            sequence.fetched = LoadedPrefix(fetched.position, fetched.buffers.state(), tuple(spans), "store")

    def _put_fetched(self, keys: Keys[bytes], fetched: FetchedPrefix) -> None:
        for stop, kv in fetched.segments.items():
            self._host.put_segment(self._names.segment(keys, stop), {"kv": as_part("kv", kv)})
        groups = self._names.checkpoint(keys[-1], fetched.position)
        parts = {key: fetched.buffers.parts(group) for group, key in enumerate(groups)}
        self._host.put_checkpoint(keys[-1], fetched.position, parts)

    def _complete(self, fetched: LoadedPrefix, keys: Keys[bytes], start: int) -> LoadedPrefix | None:
        """Adds the KV that was local when the fetch began; None where it has gone since."""
        segments = {span.stop: span.kv for span in fetched.spans if span.stop % SEGMENT_TOKENS == 0}
        tail = [span for span in fetched.spans if span.stop % SEGMENT_TOKENS]
        spans = self._host.read_segments(keys, start, segments)
        return None if spans is None else replace(fetched, spans=(*spans, *tail))

    def _load_local(self, keys: Keys[bytes], start: int) -> LoadedPrefix | None:
        position = len(keys) * BLOCK_TOKENS
        buffers = self._host.read_checkpoint(keys[-1], position)
        spans = self._host.read_segments(keys, start, {})
        if buffers is None or spans is None:
            return None
        source: CacheSource = "device" if start >= position else "host"
        return LoadedPrefix(position, buffers.state(), (*spans, *_tail_span(buffers, position)), source)


def _tail_span(buffers: CheckpointBuffers, position: int) -> list[KvSpan]:
    tail = buffers.kv_tail
    return [] if tail is None else [KvSpan(floor_to_segment(position), position, tail)]
