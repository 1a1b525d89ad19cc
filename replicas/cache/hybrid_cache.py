"""Owns which prefix a sequence starts from, and who waits for whom. Engine thread only.

A prefix is usable where its KV, its recurrent and its conv state are all there, and nowhere else. KV is resident in
device blocks or lies in the host tier; states lie in the host tier; the shared store holds both.
"""

import time
from collections import Counter
from collections.abc import Sequence as Keys
from dataclasses import replace

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS
from warmstate.models.backend import ModelBackend, SequenceState
from warmstate.replicas.cache.blockers import PathFacts
from warmstate.replicas.cache.copying import Copier, CopyNow, Post
from warmstate.replicas.cache.fetch_miss import FetchMiss
from warmstate.replicas.cache.fetcher import Fetcher
from warmstate.replicas.cache.host_tier import HostTier, Room
from warmstate.replicas.cache.keeper import CheckpointKeeper
from warmstate.replicas.cache.parking import ParkingArea
from warmstate.replicas.cache.placement import PlacementLimits, kind_of_mark, last_usable_boundary
from warmstate.replicas.cache.placer import CheckpointPlacer
from warmstate.replicas.cache.prefix_analysis import PrefixAnalysis, PromptAccount, StartedPrompt
from warmstate.replicas.cache.prefix_reader import FetchedPrefix
from warmstate.replicas.cache.state_codec import (
    CheckpointBuffers,
    CheckpointNames,
    as_part,
    floor_to_segment,
)
from warmstate.replicas.cache.store_link import StoreLink
from warmstate.replicas.cache.twins import PendingPrefixes
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.histogram import SECONDS, Histogram
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.messages import CacheSource, CheckpointKind
from warmstate.replicas.scheduler import PrefixMatch
from warmstate.replicas.sequence import KvSpan, LoadedPrefix, Sequence, SequenceStatus

_COUNTERS = (
    *(f"restores_{source}" for source in ("device", "host", "store", "parked")),
    *(f"restored_tokens_{source}" for source in ("device", "host", "store")),
    "twin_waits",
)


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
        config: CacheConfig,
        link: StoreLink | None = None,
        fetcher: Fetcher | None = None,
        account: PromptAccount | None = None,
        copier: Copier | None = None,
    ) -> None:
        self._backend = backend
        self._shapes = backend.shapes
        self._blocks = blocks
        self._host = host
        self._parking = parking
        self._names = names
        self._post = post
        self._link = link
        self._keeper = CheckpointKeeper(backend, blocks, host, names, link, config, copier or CopyNow(), post)
        limits = PlacementLimits(config.max_checkpoints_per_path, backend.limits.max_prefill_splits)
        self._placer = CheckpointPlacer(blocks, host, link, limits)
        self._fetcher = fetcher
        self._account = account or PrefixAnalysis()
        self._load_seconds = Histogram(SECONDS)
        self._enabled = config.enabled
        self._pending = PendingPrefixes()
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))

    def meet(self, sequence: Sequence) -> None:
        """A sequence has arrived."""
        if self._enabled:
            self._placer.meet(sequence)

    def find(self, sequence: Sequence) -> PrefixMatch | None:
        """The deepest usable prefix; None while it is being fetched, or computed by a twin."""
        parked = self._parking.find(sequence)
        if parked is not None:
            return PrefixMatch(parked.position)
        if not self._enabled:
            return PrefixMatch(0)
        keys = sequence.prefix_keys[: last_usable_boundary(sequence.num_tokens) // BLOCK_TOKENS]
        num_resident = self._blocks.count_resident(keys)
        # Before `find` drops a state whose KV has gone.
        states = self._host.checkpoints_on_path(keys)
        sequence.num_state = max(sequence.num_state, *(position for position, _ in states), 0)
        position = self._host.find(keys, num_resident)
        if sequence.fetched is not None:
            position = max(position, sequence.fetched.position)
        # Whoever waits promises nothing, so that no two sequences can wait for each other.
        self._pending.withdraw(sequence)
        if self._must_wait(sequence, keys, position):
            return None
        for placement in self._placer.place(sequence, position):
            self._pending.put(sequence, keys[placement.position // BLOCK_TOKENS - 1])
        return PrefixMatch(position, min(num_resident, position // BLOCK_TOKENS))

    def load(self, sequence: Sequence, match: PrefixMatch) -> LoadedPrefix | None:
        """The state and the KV beside the resident blocks; None, and never found again, where a part is gone."""
        parked = self._parking.take(sequence)
        if parked is not None:
            self._counts["restores_parked"] += 1
            return parked
        began, start = time.perf_counter(), match.num_resident_blocks * BLOCK_TOKENS
        keys = sequence.prefix_keys[: match.position // BLOCK_TOKENS]
        fetched, sequence.fetched = sequence.fetched, None
        if self._fetcher is not None:
            self._fetcher.release(sequence)
        if fetched is not None and fetched.position == match.position:
            loaded = self._complete(fetched, keys, start)
        else:
            loaded = self._load_local(keys, start)
        if loaded is not None:
            self._load_seconds.observe(time.perf_counter() - began)
            self._counts[f"restores_{loaded.source}"] += 1
            self._counts[f"restored_tokens_{loaded.source}"] += match.position
        return loaded

    def park(self, sequence: Sequence) -> None:
        self._pending.withdraw(sequence)
        self._parking.put(sequence)

    def started(self, sequence: Sequence) -> None:
        """A sequence runs for the first time, from what was found for it."""
        if self._fetcher is not None:
            self._fetcher.started(sequence)
        if self._enabled:
            self._account.put(self._started_prompt(sequence))
            self._keeper.publish_on_second_sight(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Lets go of everything kept for a sequence that has ended."""
        if self._fetcher is not None:
            self._fetcher.release(sequence)
        self._pending.withdraw(sequence)
        self._parking.take(sequence)
        self._parking.take_output(sequence)

    def keep(self, sequence: Sequence, state: SequenceState) -> bool:
        """Takes a state that a committed step handed out; False, and nothing is kept, if it is not finite."""
        kinds = {placement.position: placement.kind for placement in sequence.placements}
        if state.position not in kinds:
            self._parking.put_output(sequence, state)
            return True
        return self._keep(sequence, state, kinds[state.position])

    def keep_output(self, sequence: Sequence) -> bool:
        """Keeps the end of the output of a running sequence that ends; False, and nothing, if it is not finite."""
        if self._enabled:
            self._placer.part(sequence)
        state = self._parking.take_output(sequence)
        return state is None or self._keep(sequence, state, CheckpointKind.OUTPUT)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is kept for any living sequence, and nothing is being copied."""
        holds_fetched = self._fetcher is not None and not self._fetcher.is_idle
        return self._keeper.is_idle and self._pending.is_empty and self._parking.num_bytes == 0 and not holds_fetched

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what the host tier and the parking area hold now."""
        host = {f"host_{name}": value for name, value in self._host.stats().items()}
        told = {**self._account.stats(), **self._load_seconds.as_dict("cache_load_seconds")}
        kept = {**self._keeper.stats(), **self._placer.stats()}
        sources = [source.stats() for source in (self._link, self._fetcher) if source is not None]
        link = {f"store_{name}": value for figures in sources for name, value in figures.items()}
        counts = {name: float(count) for name, count in self._counts.items()}
        return {**counts, **told, **kept, **host, **self._parking.stats(), **link}

    def _keep(self, sequence: Sequence, state: SequenceState, kind: CheckpointKind) -> bool:
        copy = self._pending.hand_over(sequence, sequence.prefix_keys[state.position // BLOCK_TOKENS - 1])
        return self._keeper.keep(sequence, state, kind, lambda: self._pending.withdraw(copy))

    def _must_wait(self, sequence: Sequence, keys: Keys[bytes], position: int) -> bool:
        """Waits for a twin that will make a prefix usable beyond `position`, or fetches where that is sooner."""
        may_fetch = self._fetcher is not None and not sequence.was_fetched
        wanted = self._fetcher.decide(sequence, keys, position).chosen if self._fetcher and may_fetch else None
        stored = wanted.position if wanted else 0
        leader = self._pending.find_leader(sequence, keys, max(position, stored - BLOCK_TOKENS))
        # One leader per sequence: a burst of twins whose checkpoint cannot be kept must not run one after another.
        if leader is not None and sequence.twin_leader in (None, leader.arrival):
            self._counts["twin_waits"] += sequence.twin_leader is None
            sequence.twin_leader = leader.arrival
            return True
        if wanted is None or self._fetcher is None:
            return False
        if self._fetcher.has_room(sequence, wanted):
            self._pending.put(sequence, keys[stored // BLOCK_TOKENS - 1])
            path = keys[: stored // BLOCK_TOKENS]
            started = self._fetcher.start(
                sequence, path, lambda outcome: self._post(lambda: self._take_fetched(sequence, outcome))
            )
            if not started:
                self._pending.withdraw(sequence)
            return started
        return True

    def _started_prompt(self, sequence: Sequence) -> StartedPrompt:
        """What is known of the path of a sequence that begins to run."""
        limit = last_usable_boundary(sequence.num_prompt_tokens)
        keys = sequence.prefix_keys[: limit // BLOCK_TOKENS]
        num_resident = self._blocks.count_resident(keys)
        missing = self._host.missing_segments(keys, num_resident, limit)
        num_hosted = missing[0] - SEGMENT_TOKENS if missing else floor_to_segment(limit)
        facts = PathFacts(
            limit=len(keys) * BLOCK_TOKENS,
            num_cached=sequence.num_cached_tokens or 0,
            num_kv=max(num_resident * BLOCK_TOKENS, num_hosted),
            num_state=sequence.num_state,
            num_stored=sequence.fetch_decision.num_stored if sequence.fetch_decision else 0,
            fetch_miss=sequence.fetch_miss,
        )
        return StartedPrompt(
            sequence.request.chain_root, keys, sequence.request.token_ids, sequence.cache_source, facts
        )

    def _take_fetched(self, sequence: Sequence, outcome: FetchedPrefix | FetchMiss) -> None:
        """Ends the wait of a sequence, which may have been cancelled meanwhile."""
        assert self._fetcher is not None, "a fetch needs a store"
        self._fetcher.ended(sequence)
        self._pending.withdraw(sequence)
        fetched = outcome if isinstance(outcome, FetchedPrefix) else None
        sequence.fetch_miss = outcome if isinstance(outcome, FetchMiss) else None
        room = self._fetcher.take_room(sequence)
        if fetched is not None:
            self._put_fetched(sequence, fetched, room)
        elif room is not None:
            self._host.give_up(room)
        if sequence.status is not SequenceStatus.FETCHING:
            self._fetcher.release(sequence)
            return
        sequence.status = SequenceStatus.WAITING
        if fetched is None:
            self._fetcher.release(sequence)
            return
        spans = [KvSpan(stop - SEGMENT_TOKENS, stop, kv) for stop, kv in fetched.segments.items()]
        spans += _tail_span(fetched.buffers, fetched.position)
        sequence.fetched = LoadedPrefix(fetched.position, fetched.buffers.state(), tuple(spans), "store")

    def _put_fetched(self, sequence: Sequence, fetched: FetchedPrefix, room: Room | None) -> None:
        keys = sequence.prefix_keys[: fetched.position // BLOCK_TOKENS]
        kind = kind_of_mark(fetched.position, sequence.request.marks)
        room = room or self._host.reserve(keys, fetched.position, kind)
        if room is None:
            return
        segments = {self._names.segment(keys, stop): {"kv": as_part("kv", kv)} for stop, kv in fetched.segments.items()}
        groups = self._names.checkpoint(keys[-1], fetched.position)
        self._host.put(room, segments, {key: fetched.buffers.parts(group) for group, key in enumerate(groups)})

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
