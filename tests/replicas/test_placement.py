"""Where checkpoints go, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstate.replicas.cache.placement import (
    KnownPath,
    Placement,
    PlacementLimits,
    kind_of_mark,
    last_usable_boundary,
    place_checkpoints,
    surplus_checkpoints,
)
from warmstate.replicas.messages import CheckpointKind, Mark

SYSTEM, TURN, LOOP, HINT, END, BRANCH, OUTPUT, SAFETY = CheckpointKind


def place(
    num_tokens: int,
    *marks: tuple[CheckpointKind, int],
    limits: PlacementLimits = PlacementLimits(),  # noqa: B008
    checkpoints: tuple[Placement, ...] = (),
    start: int = 0,
    known: int = 0,
) -> list[tuple[int, CheckpointKind]]:
    """The chosen (position, kind)."""
    path = KnownPath(start, checkpoints, known)
    chosen = place_checkpoints(num_tokens, [Mark(kind, position) for kind, position in marks], path, limits)
    return [(placement.position, placement.kind) for placement in chosen]


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 0), (64, 0), (65, 64), (128, 64), (129, 128), (1000, 960)]
)
def test_the_last_boundary_leaves_a_token_to_compute(num_tokens: int, expected: int) -> None:
    assert last_usable_boundary(num_tokens) == expected


def test_a_plain_prompt_is_checkpointed_at_its_last_boundary() -> None:
    assert place(1000) == [(960, END)]
    assert place(128) == [(64, END)]
    assert place(64) == []


def test_a_chat_is_checkpointed_before_its_generation_prompt_and_after_its_system_block() -> None:
    assert place(1000, (SYSTEM, 300), (TURN, 990)) == [(256, SYSTEM), (960, TURN)]


def test_marks_are_floored_sorted_and_distinct() -> None:
    assert place(1000, (TURN, 700), (HINT, 130), (HINT, 650), (HINT, 129)) == [(128, HINT), (640, TURN)]


def test_a_mark_at_or_beyond_the_end_still_leaves_a_token() -> None:
    assert place(128, (TURN, 128)) == [(64, TURN)]
    assert place(128, (TURN, 5000)) == [(64, TURN)]


def test_a_mark_within_the_first_block_gives_nothing() -> None:
    assert place(1000, (TURN, 63)) == []


def test_a_tool_loop_keeps_what_is_left_when_the_user_speaks_next() -> None:
    assert place(1000, (LOOP, 500), (TURN, 900)) == [(448, LOOP), (896, TURN)]


def test_the_second_prompt_on_a_path_is_checkpointed_where_it_leaves_the_first() -> None:
    assert place(1000, known=500) == [(448, BRANCH), (960, END)]
    assert place(1000, (SYSTEM, 100), (TURN, 990), known=500, start=64) == [(448, BRANCH), (960, TURN)]


def test_no_branch_where_a_checkpoint_is_usable_up_to_it() -> None:
    assert place(1000, known=500, start=448) == [(960, END)]


def test_a_prompt_that_is_known_whole_does_not_branch() -> None:
    assert place(1000, (TURN, 900), known=960) == [(896, TURN)]


def test_nothing_is_placed_where_nothing_is_computed() -> None:
    assert place(1000, (SYSTEM, 300), (TURN, 990), start=960) == []


def test_a_long_path_has_safety_positions_at_powers_of_two() -> None:
    assert place(9000, (TURN, 8990)) == [(1024, SAFETY), (2048, SAFETY), (4096, SAFETY), (8192, SAFETY), (8960, TURN)]
    assert len(place(1 << 19, limits=PlacementLimits(max_per_path=99))) == 9


def test_a_position_wanted_twice_is_called_by_what_keeps_it_longest() -> None:
    assert place(1000, (TURN, 500), (SYSTEM, 470), (HINT, 450)) == [(448, SYSTEM)]
    assert place(1000, (TURN, 500), known=500) == [(448, BRANCH)]
    assert place(3000, (HINT, 1050), (TURN, 2990)) == [(1024, HINT), (2048, SAFETY), (2944, TURN)]


def test_the_cap_gives_up_safety_positions_first() -> None:
    few = PlacementLimits(max_per_path=3)
    assert place(9000, (SYSTEM, 300), (TURN, 8990), limits=few) == [(256, SYSTEM), (8192, SAFETY), (8960, TURN)]


def test_the_cap_counts_what_is_on_the_path_already() -> None:
    old = tuple(Placement(64 * i, END) for i in range(1, 9))
    assert place(9000, (TURN, 8990), start=512, checkpoints=old) == [(8960, TURN)]


def test_old_turns_of_a_conversation_are_surplus_and_its_forks_and_tail_are_not() -> None:
    path = [
        Placement(64, SYSTEM),
        Placement(128, BRANCH),
        Placement(192, TURN),
        Placement(256, OUTPUT),
        Placement(320, HINT),
        Placement(384, SAFETY),
        Placement(448, HINT),
        Placement(512, TURN),
        Placement(576, OUTPUT),
    ]
    order = [384, 192, 256, 320]
    for limit in range(9, -1, -1):
        dropped = [placement.position for placement in surplus_checkpoints(path, limit)]
        assert dropped == order[: min(9 - limit, 4)]


def test_a_backend_with_few_splits_hands_out_the_most_valuable() -> None:
    two = PlacementLimits(max_prefill_splits=2)
    marks = ((SYSTEM, 300), (HINT, 500), (TURN, 8990))
    assert place(9000, *marks, limits=two) == [(256, SYSTEM), (8960, TURN)]
    assert place(9000, *marks, limits=two, start=256, known=4000) == [(3968, BRANCH), (8960, TURN)]


def test_what_another_replica_kept_is_called_by_the_marks_of_who_fetches_it() -> None:
    marks = [Mark(SYSTEM, 300), Mark(HINT, 310), Mark(TURN, 990)]
    assert [kind_of_mark(position, marks) for position in (256, 960, 512)] == [SYSTEM, TURN, END]


@given(
    st.integers(1, 300_000),
    st.lists(st.tuples(st.sampled_from([SYSTEM, TURN, LOOP, HINT]), st.integers(0, 300_000)), max_size=8),
    st.integers(0, 4000).map(lambda block: 64 * block),
    st.integers(0, 300_000),
    st.integers(1, 12),
    st.none() | st.integers(0, 4),
)
def test_every_position_is_a_boundary_that_is_computed_and_leaves_a_token(
    num_tokens: int,
    marks: list[tuple[CheckpointKind, int]],
    start: int,
    known: int,
    cap: int,
    splits: int | None,
) -> None:
    chosen = place(num_tokens, *marks, start=start, known=known, limits=PlacementLimits(cap, splits))
    positions = [position for position, _ in chosen]
    assert positions == sorted(set(positions))
    assert all(p % 64 == 0 and start < p < num_tokens for p in positions)
    assert splits is None or len(chosen) <= splits
    # Beyond the cap only forks and the deepest of each kind stay.
    assert len(chosen) <= cap or all(kind is not SAFETY for _, kind in chosen)
