"""What runs next, over a table of prefixes and no model."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.messages import GenerateRequest
from warmstate.replicas.scheduler import PrefixMatch, Schedule, Scheduler, chunk_tokens
from warmstate.replicas.sequence import LoadedPrefix, SequenceStatus
from warmstate.replicas.sequence import Sequence as Request
from warmstate.replicas.slots import SlotPool


class NoPrefixes:
    """Nothing is usable; remembers who was parked, and makes those in `waits` wait."""

    def __init__(self) -> None:
        self.parked: list[int] = []
        self.waits: set[int] = set()

    def find(self, sequence: Request) -> PrefixMatch | None:
        return None if sequence.arrival in self.waits else PrefixMatch(0)

    def load(self, sequence: Request, match: PrefixMatch) -> LoadedPrefix | None:
        raise AssertionError("nothing was found")

    def park(self, sequence: Request) -> None:
        self.parked.append(sequence.arrival)


class Bench:
    """A scheduler and a hand to play the engine."""

    def __init__(
        self, make: Callable[..., GenerateRequest], budget: int = 256, slots: int = 4, blocks: int = 64
    ) -> None:
        self._make = make
        self.blocks = BlockPool(blocks)
        self.prefixes = NoPrefixes()
        self.scheduler = Scheduler(budget, self.blocks, SlotPool(slots), self.prefixes)
        self.sequences: list[Request] = []

    def add(self, *lengths: int, max_tokens: int = 500) -> None:
        for length in lengths:
            sequence = Request(self._make(range(length), max_tokens=max_tokens), len(self.sequences), 4096)
            self.sequences.append(sequence)
            self.scheduler.put(sequence)

    def step(self) -> list[tuple[int, int, int]]:
        """One step, as if each sampling row gave a token: [(arrival, start, count)]."""
        schedule = self.scheduler.schedule()
        self.commit(schedule)
        return [(row.sequence.arrival, row.start, row.count) for row in schedule.rows]

    def commit(self, schedule: Schedule) -> None:
        for row in schedule.rows:
            sampled = row.sample
            row.sequence.num_computed = row.start + row.count
            if sampled:
                row.sequence.put_token(1)


@pytest.fixture
def bench(request_for: Callable[..., GenerateRequest]) -> Callable[..., Bench]:
    def build(**sizes: Any) -> Bench:
        return Bench(request_for, **sizes)

    return build


@pytest.mark.parametrize(
    ("start", "stop", "budget", "expected"),
    [(0, 100, 100, 100), (0, 100, 99, 64), (0, 100, 63, 0), (64, 200, 130, 128), (10, 200, 60, 54), (10, 200, 50, 0)],
)
def test_chunks_end_at_boundaries_or_at_the_end(start: int, stop: int, budget: int, expected: int) -> None:
    assert chunk_tokens(start, stop, budget) == expected


def test_a_long_prompt_is_cut_at_multiples_of_64_under_the_budget(bench: Callable[..., Bench]) -> None:
    steps = bench(budget=150)
    steps.add(300)
    assert [steps.step() for _ in range(4)] == [[(0, 0, 128)], [(0, 128, 128)], [(0, 256, 44)], [(0, 300, 1)]]


def test_decodes_come_first_and_never_fragment_a_prefill(bench: Callable[..., Bench]) -> None:
    steps = bench(budget=130)
    steps.add(10, 20)
    steps.step()
    steps.add(400)
    assert steps.step() == [(0, 10, 1), (1, 20, 1), (2, 0, 128)]
    assert steps.step() == [(0, 11, 1), (1, 21, 1), (2, 128, 128)]
    # One decode more leaves 127 tokens: one block, never a part of one.
    steps.add(5)
    assert steps.step() == [(0, 12, 1), (1, 22, 1), (2, 256, 128)]


def test_decodes_never_starve_a_prefill(bench: Callable[..., Bench]) -> None:
    steps = bench(budget=64)
    steps.add(10)
    steps.step()
    steps.add(200)
    assert steps.step() == [(0, 10, 1), (1, 0, 64)]
    assert steps.step() == [(0, 11, 1), (1, 64, 64)]


def test_sequences_are_admitted_in_order_of_arrival(bench: Callable[..., Bench]) -> None:
    steps = bench(slots=2)
    steps.add(10, 10, 10)
    assert [arrival for arrival, _, _ in steps.step()] == [0, 1]
    steps.scheduler.remove(steps.sequences[0])
    assert [arrival for arrival, _, _ in steps.step()] == [1, 2]


def test_nobody_overtakes_a_prompt_that_waits_for_blocks(bench: Callable[..., Bench]) -> None:
    steps = bench(blocks=8)
    steps.add(300, 300, 10)
    assert steps.step() == [(0, 0, 256)]
    assert [arrival for arrival, _, _ in steps.step()] == [0]


def test_others_pass_a_sequence_that_waits_for_a_prefix(bench: Callable[..., Bench]) -> None:
    steps = bench()
    steps.add(10, 10)
    steps.prefixes.waits = {0}
    assert [arrival for arrival, _, _ in steps.step()] == [1]
    steps.prefixes.waits = set()
    assert steps.step() == [(1, 10, 1), (0, 0, 10)]


def test_a_fetching_sequence_is_not_even_asked(bench: Callable[..., Bench]) -> None:
    steps = bench()
    steps.add(10)
    steps.sequences[0].status = SequenceStatus.FETCHING
    assert steps.step() == []


def test_the_youngest_is_preempted_when_blocks_run_out_and_comes_back(bench: Callable[..., Bench]) -> None:
    steps = bench(blocks=5)
    steps.add(64, 64)
    steps.step()
    assert steps.scheduler.num_preemptions == 0
    arrivals: Sequence[int] = ()
    for _ in range(140):
        arrivals = [arrival for arrival, _, _ in steps.step()]
    assert steps.scheduler.num_preemptions == 1
    assert steps.prefixes.parked == [1]
    assert arrivals == [0]
    assert steps.sequences[1].block_table == []
    steps.scheduler.remove(steps.sequences[0])
    assert steps.step() == [(1, 0, steps.sequences[1].num_tokens - 1)]


def test_what_is_removed_holds_nothing(bench: Callable[..., Bench]) -> None:
    steps = bench(slots=2)
    steps.add(100, 100, 100)
    steps.step()
    for sequence in steps.sequences:
        steps.scheduler.remove(sequence)
    assert steps.blocks.num_free == steps.blocks.capacity
    steps.blocks.check_integrity()
    assert steps.step() == []
