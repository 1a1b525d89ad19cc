"""Owns the choice of the positions whose state is worth keeping. Pure; knows no engine, no cache and no load."""

from collections.abc import Sequence

from warmstate.models.backend import floor_to_block


def last_usable_boundary(num_tokens: int) -> int:
    """The deepest boundary of `num_tokens` tokens that still leaves one token to compute; 0 when there is none."""
    return floor_to_block(max(num_tokens - 1, 0))


def checkpoint_positions(num_prompt_tokens: int, marks: Sequence[int]) -> tuple[int, ...]:
    """Where to checkpoint a prompt: its marks, or its last boundary when the renderer knows of none.

    Sorted, distinct, multiples of 64, each leaving at least one token of the prompt to compute. The choice depends on
    the prompt alone, never on how load cuts it into chunks.
    """
    deepest = last_usable_boundary(num_prompt_tokens)
    wanted = [min(floor_to_block(mark), deepest) for mark in marks] or [deepest]
    return tuple(sorted({position for position in wanted if position > 0}))
