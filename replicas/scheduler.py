"""Owns what runs next: continuous batching under a token budget, admission in order of arrival, preemption.

Knows prefixes only through `PrefixSource`, and no tensors.
"""

import bisect
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from warmstate.models.backend import BLOCK_TOKENS, blocks_for, floor_to_block
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.sequence import LoadedPrefix, Sequence, SequenceStatus
from warmstate.replicas.slots import SlotPool


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A usable prefix of `position` tokens, whose first `num_resident_blocks` blocks are resident."""

    position: int
    num_resident_blocks: int = 0


class PrefixSource(Protocol):
    """Where prefixes come from: `hybrid_cache.HybridCache`, or a table in the scheduler's tests."""

    def find(self, sequence: Sequence) -> PrefixMatch | None:
        """The prefix to start from (position 0 when there is none); None while the sequence must wait for one."""
        ...

    def load(self, sequence: Sequence, match: PrefixMatch) -> LoadedPrefix | None:
        """Brings a found prefix to the host; None when it is gone, and then `find` no longer finds it."""
        ...

    def park(self, sequence: Sequence) -> None:
        """Keeps the exact state of a running sequence, if there is room, for its next `find` and `load`."""
        ...


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """`count` tokens of a sequence from `start`; `sample` when they reach the end of what is known."""

    sequence: Sequence
    start: int
    count: int

    @property
    def sample(self) -> bool:
        return self.start + self.count == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that begins to run this step, in its slot, from `prefix` (None: from nothing)."""

    sequence: Sequence
    slot: int
    prefix: LoadedPrefix | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work: decodes first, then prefill chunks in order of arrival."""

    rows: tuple[ScheduledRow, ...]
    admissions: tuple[Admission, ...]


class _Verdict(Enum):
    PASSED_OVER = 1
    NO_ROOM = 2


def chunk_tokens(start: int, stop: int, budget: int) -> int:
    """Tokens to prefill from `start`: all up to `stop` if the budget allows, else up to a block boundary."""
    end = min(stop, start + budget)
    return end - start if end == stop else max(floor_to_block(end) - start, 0)


class Scheduler:
    """Chooses the rows of each step, and hands out and takes back slots and blocks."""

    def __init__(self, max_batch_tokens: int, blocks: BlockPool, slots: SlotPool, prefixes: PrefixSource) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._blocks = blocks
        self._slots = slots
        self._prefixes = prefixes
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def put(self, sequence: Sequence) -> None:
        """Queues a sequence at the place of its arrival."""
        bisect.insort(self.waiting, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence, wherever it stands, and takes back what it holds."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._take_back(sequence)
        sequence.fetched = None
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> Schedule:
        """The next step. Empty when nothing can run before something arrives."""
        rows = self._schedule_decodes()
        # However many decode, one block of prompt goes on: less than a block could not be cut off.
        budget = max(self._max_batch_tokens - len(rows), BLOCK_TOKENS)
        for sequence in self.running:
            if sequence.is_decoding:
                continue
            count = chunk_tokens(sequence.num_computed, sequence.num_tokens, budget)
            if count:
                rows.append(ScheduledRow(sequence, sequence.num_computed, count))
                budget -= count
        admissions = self._admit_waiting(budget, rows)
        return Schedule(tuple(rows), tuple(admissions))

    def _schedule_decodes(self) -> list[ScheduledRow]:
        rows: list[ScheduledRow] = []
        for sequence in list(self.running):
            if len(rows) == self._max_batch_tokens:
                break
            if sequence.status is SequenceStatus.RUNNING and sequence.is_decoding and self._grow(sequence):
                rows.append(ScheduledRow(sequence, sequence.num_computed, 1))
        return rows

    def _grow(self, sequence: Sequence) -> bool:
        """Makes room for one more token, at the cost of the youngest; False when that was `sequence` itself."""
        if len(sequence.block_table) >= blocks_for(sequence.num_tokens):
            return True
        while not self._blocks.fits(1):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.block_table += self._blocks.take_free(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._prefixes.park(sequence)
        self.running.remove(sequence)
        self._take_back(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        self.num_preemptions += 1
        self.put(sequence)

    def _admit_waiting(self, budget: int, rows: list[ScheduledRow]) -> list[Admission]:
        admissions: list[Admission] = []
        for sequence in list(self.waiting):
            if not self._slots.num_free or budget <= 0:
                break
            if sequence.status is SequenceStatus.FETCHING:
                continue
            verdict = self._admit(sequence, budget)
            if verdict is _Verdict.NO_ROOM:
                break
            if isinstance(verdict, Admission):
                count = chunk_tokens(sequence.num_computed, sequence.num_tokens, budget)
                rows.append(ScheduledRow(sequence, sequence.num_computed, count))
                admissions.append(verdict)
                budget -= count
        return admissions

    def _admit(self, sequence: Sequence, budget: int) -> Admission | _Verdict:
        while True:
            match = self._prefixes.find(sequence)
            if match is None:
                return _Verdict.PASSED_OVER
            resident = sequence.prefix_keys[: match.num_resident_blocks]
            num_blocks = blocks_for(sequence.num_tokens)
            # Each running sequence may soon want a block: without that spare, an admission would be preempted at once.
            fits = self._blocks.fits(num_blocks, resident, spare=len(self.running))
            if not fits or not chunk_tokens(match.position, sequence.num_tokens, budget):
                return _Verdict.NO_ROOM
            prefix = self._prefixes.load(sequence, match) if match.position else None
            if prefix is not None or match.position == 0:
                break
        sequence.block_table = self._blocks.take_resident(resident)
        sequence.block_table += self._blocks.take_free(num_blocks - len(resident))
        return self._start(sequence, match, prefix)

    def _start(self, sequence: Sequence, match: PrefixMatch, prefix: LoadedPrefix | None) -> Admission:
        sequence.slot = self._slots.take()
        sequence.num_computed = match.position
        sequence.num_shared_blocks = sequence.num_keyed_blocks = match.num_resident_blocks
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = match.position
            sequence.cache_source = prefix.source if prefix else "none"
        sequence.fetched = None
        sequence.status = SequenceStatus.RUNNING
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_arrival)
        return Admission(sequence, sequence.slot, prefix)

    def _take_back(self, sequence: Sequence) -> None:
        self._blocks.release(sequence.block_table)
        sequence.block_table = []
        if sequence.slot is not None:
            self._slots.release(sequence.slot)
        sequence.slot = None
        sequence.num_computed = 0


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
