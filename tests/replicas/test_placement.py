"""Where checkpoints go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstate.replicas.cache.placement import checkpoint_positions, last_usable_boundary


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 0), (64, 0), (65, 64), (128, 64), (129, 128), (1000, 960)]
)
def test_the_last_boundary_leaves_a_token_to_compute(num_tokens: int, expected: int) -> None:
    assert last_usable_boundary(num_tokens) == expected


def test_a_plain_prompt_is_checkpointed_at_its_last_boundary() -> None:
    assert checkpoint_positions(1000, ()) == (960,)


def test_marks_are_floored_sorted_and_distinct() -> None:
    assert checkpoint_positions(1000, (700, 130, 650, 129)) == (128, 640)


def test_a_mark_at_the_end_still_leaves_a_token() -> None:
    assert checkpoint_positions(128, (128,)) == (64,)


def test_a_mark_within_the_first_block_gives_nothing() -> None:
    assert checkpoint_positions(1000, (63,)) == ()


@given(st.integers(1, 5000), st.lists(st.integers(0, 6000), max_size=5))
def test_every_position_is_a_boundary_inside_the_prompt(num_tokens: int, marks: list[int]) -> None:
    positions = checkpoint_positions(num_tokens, marks)
    assert list(positions) == sorted(set(positions))
    assert all(p % 64 == 0 and 0 < p < num_tokens for p in positions)
    assert len(positions) <= max(1, len(marks))
