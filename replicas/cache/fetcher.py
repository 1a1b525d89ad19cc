"""Owns a replica's fetches: decides what to bring from the store, and bounds what they hold. Engine thread only."""

import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Keys

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS
from warmstate.models.backend import ModelBackend
from warmstate.replicas.cache.estimates import RateEstimate
from warmstate.replicas.cache.fetch_miss import FetchMiss
from warmstate.replicas.cache.fetch_rule import (
    PROBE_AFTER_S,
    FetchCandidate,
    FetchDecision,
    FetchInputs,
    FetchReason,
    decide,
)
from warmstate.replicas.cache.host_tier import HostTier, Room
from warmstate.replicas.cache.placement import kind_of_mark
from warmstate.replicas.cache.prefix_reader import FetchedPrefix
from warmstate.replicas.cache.state_codec import floor_to_segment, state_bytes
from warmstate.replicas.cache.store_link import StoreLink
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.sequence import Sequence, SequenceStatus

_LOG = logging.getLogger(__name__)

# A prefix seldom has more than a few checkpoints in the store, and the shallowest of many cannot be the best.
_MAX_CANDIDATES = 8


class Fetcher:
    """What it holds, from the start of a fetch until its sequence has begun to run, is bounded by what could run here
    (slots, KV tokens) and by `max_in_flight_bytes`. Who finds no room waits, as long as fetching still pays.

    A prefix larger than that comes straight into the host tier, under the budget of that, where it finds room.
    """

    def __init__(
        self,
        link: StoreLink,
        backend: ModelBackend,
        blocks: BlockPool,
        host: HostTier,
        prefill: RateEstimate,
        config: CacheConfig,
    ) -> None:
        self._link = link
        self._backend = backend
        self._shapes = backend.shapes
        self._blocks = blocks
        self._host = host
        self._prefill = prefill
        self._policy = config.fetch_policy
        self._max_bytes = config.max_in_flight_bytes
        self._clock = link.clock
        self._held: dict[Sequence, FetchCandidate] = {}
        self._rooms: dict[Sequence, Room] = {}
        self._in_flight: set[Sequence] = set()
        self._probe: Sequence | None = None
        self._probed_at_s: float | None = None
        self._room: Counter[str] = Counter(waited=0, refused=0)
        self._reasons: Counter[str] = Counter(dict.fromkeys(FetchReason, 0))

    def decide(self, sequence: Sequence, keys: Keys[bytes], local_position: int) -> FetchDecision:
        """What to fetch for a sequence that could start at `local_position` now. The last decision stays with it."""
        stored = [position for position in self._link.find_positions(keys) if position > local_position]
        num_resident = self._blocks.count_resident(keys) if stored else 0
        inputs = FetchInputs(
            num_tokens=sequence.num_tokens,
            local_position=local_position,
            candidates=tuple(self._candidate(keys, num_resident, position) for position in stored[-_MAX_CANDIDATES:]),
            max_bytes=max(self._max_bytes, self._host.budget_bytes),
            num_in_flight=len(self._in_flight),
            prefill_tokens_per_s=self._prefill.find(),
            store=self._link.transfer_rate,
            may_probe=self._may_probe(),
        )
        sequence.fetch_decision = decision = decide(self._policy, inputs)
        return decision

    def has_room(self, sequence: Sequence, wanted: FetchCandidate) -> bool:
        """Whether a fetch may start now; counts a sequence that has to wait for that, once."""
        held = self._held.values()
        fits = not held or (
            len(held) < self._backend.limits.num_slots
            and sum(other.position for other in held) + wanted.position <= self._blocks.capacity * BLOCK_TOKENS
            and self._held_bytes + self._bytes_to_hold(wanted) <= self._max_bytes
        )
        if not fits and not sequence.waited_to_fetch:
            sequence.waited_to_fetch = True
            self._room["waited"] += 1
        return fits

    def start(self, sequence: Sequence, keys: Keys[bytes], done: Callable[[FetchedPrefix | FetchMiss], None]) -> bool:
        """Starts the one fetch of a sequence, as decided; `done` is called on the event loop.

        False, and never, where the prefix is too large for what may be in flight and the host tier has no room now.
        """
        decision = sequence.fetch_decision
        assert decision is not None, "a fetch follows a decision"
        assert decision.chosen is not None, "a fetch follows a decision for it"
        sequence.was_fetched = True
        if self._bytes_to_hold(decision.chosen) == 0:
            position = decision.chosen.position
            room = self._host.reserve(keys, position, kind_of_mark(position, sequence.request.marks))
            if room is None:
                self._room["refused"] += 1
                return False
            self._rooms[sequence] = room
        sequence.status = SequenceStatus.FETCHING
        self._held[sequence] = decision.chosen
        self._in_flight.add(sequence)
        if decision.reason is FetchReason.PROBE:
            self._probe, self._probed_at_s = sequence, self._clock()
        missing = self._host.missing_segments(keys, self._blocks.count_resident(keys), decision.chosen.position)
        num_bytes, expected_s = decision.chosen.num_bytes, decision.fetch_s or 0.0
        self._link.fetch(self._shapes, keys, missing, num_bytes, done, expected_s)
        return True

    def take_room(self, sequence: Sequence) -> Room | None:
        """The room in the host tier for what a sequence fetched, if it has one; the caller uses it or gives it up."""
        return self._rooms.pop(sequence, None)

    def ended(self, sequence: Sequence) -> None:
        """The fetch of a sequence has come to its end; what it holds is held until `release`."""
        self._in_flight.discard(sequence)
        if self._probe is sequence:
            self._probe = None

    def release(self, sequence: Sequence) -> None:
        """A sequence runs, or has ended: it no longer holds what was fetched for it, once nothing more can come."""
        if sequence not in self._in_flight:
            self._held.pop(sequence, None)

    def started(self, sequence: Sequence) -> None:
        """Counts and tells the decision with which a sequence has begun to run."""
        decision = sequence.fetch_decision
        if decision is None:
            return
        self._reasons[decision.reason] += 1
        miss = f"; the fetch failed: {sequence.fetch_miss}" if sequence.fetch_miss else ""
        _LOG.debug("request %s: %s%s; starts at %s", sequence.request_id, decision, miss, sequence.num_cached_tokens)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held for any sequence but those whose fetch has not ended."""
        return self._held.keys() <= self._in_flight

    def stats(self) -> dict[str, float]:
        """Decisions by reason since the start, and what is held now."""
        reasons = {f"fetch_decisions_{reason}": float(self._reasons[reason]) for reason in FetchReason}
        return {
            **reasons,
            "fetch_waits_for_room": float(self._room["waited"]),
            "fetches_in_flight": float(len(self._in_flight)),
            "fetch_held_bytes": float(self._held_bytes),
            "fetches_refused_room": float(self._room["refused"]),
        }

    @property
    def _held_bytes(self) -> int:
        return sum(map(self._bytes_to_hold, self._held.values()))

    def _bytes_to_hold(self, candidate: FetchCandidate) -> int:
        """Beside the host tier; 0 for what only the tier can hold."""
        return candidate.num_bytes if candidate.num_bytes <= self._max_bytes else 0

    def _candidate(self, keys: Keys[bytes], num_resident: int, position: int) -> FetchCandidate:
        missing = self._host.missing_segments(keys, num_resident, position)
        tail_tokens = position - floor_to_segment(position)
        num_bytes = state_bytes(self._shapes, tail_tokens + SEGMENT_TOKENS * len(missing))
        return FetchCandidate(position, num_bytes)

    def _may_probe(self) -> bool:
        rate, now = self._link.transfer_rate, self._clock()
        last = max(rate.measured_at_s if rate else now, self._probed_at_s or 0.0)
        return self._probe is None and now - last > PROBE_AFTER_S
