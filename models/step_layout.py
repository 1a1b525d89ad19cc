"""Owns the index maps of one step: where each token of the ragged batch goes in every operator. Knows no weights.

Built once per step with numpy and used by every layer, so that no layer loops over sequences or tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from warmstate.kernels.attention_torch import QueryTiles
from warmstate.models.attention_layout import build_query_tiles
from warmstate.models.backend import BLOCK_TOKENS, StateShapes, StepPlan, floor_to_block
from warmstate.models.tile_layout import TileLayout, build_tile_layout

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ConvLayout:
    """A buffer with the K - 1 inputs before each plan row's tokens, then the tokens, row after row.

    `carry_rows` and `tail_rows` [R * (K - 1)] are the inputs before and the last inputs of each row; `outputs` [T] is
    the row of each token in the result of the convolution. `boundary_rows` are the inputs before the last block
    boundary of the rows `boundary_slots` that have reached one.
    """

    num_rows: int
    token_rows: torch.Tensor
    carry_rows: torch.Tensor
    tail_rows: torch.Tensor
    outputs: torch.Tensor
    boundary_slots: torch.Tensor
    boundary_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """The rows of one token each, computed by the recurrent step, in the order of their slots.

    `run` is the slots as a slice where they follow one another: their states then need not be copied.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    run: slice | None

    def take(self, states: torch.Tensor) -> torch.Tensor:
        """The rows' part of `states` [slots, ...], to be changed in place and given to `put`."""
        return states.index_select(0, self.slots) if self.run is None else states[self.run]

    def put(self, states: torch.Tensor, taken: torch.Tensor) -> None:
        if self.run is None:
            states.index_copy_(0, self.slots, taken)


@dataclass(frozen=True, slots=True)
class Capture:
    """A state to hand out: of plan row `row` at `position`, after tile `ordinal` of tiled sequence `batch_index`.

    `ordinal` is None for a decoded row, whose state is that of its slot after the step. `conv_row` is the first of the
    K - 1 conv inputs before `position`.
    """

    row: int
    position: int
    ordinal: int | None
    batch_index: int
    conv_row: int


@dataclass(frozen=True, slots=True)
class StepLayout:
    """All maps of one step. `kv_rows` [T * kv heads] is each token's row per head among all rows of the KV pages."""

    num_tokens: int
    positions: torch.Tensor
    slots: torch.Tensor
    kv_rows: torch.Tensor
    fresh_blocks: torch.Tensor
    sampled_tokens: torch.Tensor
    conv: ConvLayout
    decode: DecodeLayout | None
    tiles: TileLayout | None
    attention: tuple[QueryTiles, ...]
    captures: tuple[Capture, ...]


def build_step_layout(plan: StepPlan, shapes: StateShapes, num_heads: int, deterministic: bool) -> StepLayout:
    """Maps of a valid plan; in deterministic mode every row is tiled, else rows of one token are decoded."""
    starts = np.array([row.start for row in plan.rows], dtype=np.int64)
    counts = np.array([row.count for row in plan.rows], dtype=np.int64)
    slots = np.array([row.slot for row in plan.rows], dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(counts.sum()) + (starts - firsts)[row_of_token]
    decoded = np.zeros(len(counts), dtype=bool) if deterministic else counts == 1
    tiled = np.flatnonzero(~decoded)
    tiles = build_tile_layout(starts, counts, firsts, slots, tiled, deterministic) if len(tiled) else None
    return StepLayout(
        num_tokens=len(positions),
        positions=to_index(positions),
        slots=to_index(slots),
        kv_rows=to_index(_kv_rows(plan, positions, row_of_token, shapes.num_kv_heads)),
        fresh_blocks=to_index(_fresh_blocks(plan)),
        sampled_tokens=to_index((firsts + counts - 1)[[row.sample for row in plan.rows]]),
        conv=_conv_layout(starts, counts, firsts, slots, row_of_token, shapes.conv_kernel - 1),
        decode=_decode_layout(firsts[decoded], slots[decoded]) if decoded.any() else None,
        tiles=tiles,
        attention=build_query_tiles(plan, firsts, num_heads, shapes.num_kv_heads, deterministic),
        captures=_captures(plan, firsts, tiles, shapes.conv_kernel - 1),
    )


def to_index(array: npt.NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


def _decode_layout(tokens: Indices, slots: Indices) -> DecodeLayout:
    order = np.argsort(slots)
    tokens, slots = tokens[order], slots[order]
    first, last = int(slots[0]), int(slots[-1])
    run = slice(first, last + 1) if last - first + 1 == len(slots) else None
    return DecodeLayout(to_index(tokens), to_index(slots), run)


def _kv_rows(plan: StepPlan, positions: Indices, row_of_token: Indices, num_kv_heads: int) -> Indices:
    tables = np.concatenate([row.block_table for row in plan.rows]).astype(np.int64)
    lengths = np.array([len(row.block_table) for row in plan.rows])
    table_firsts = np.cumsum(lengths) - lengths
    blocks = tables[table_firsts[row_of_token] + positions // BLOCK_TOKENS]
    heads = blocks[:, None] * num_kv_heads + np.arange(num_kv_heads)
    rows: Indices = (heads * BLOCK_TOKENS + (positions % BLOCK_TOKENS)[:, None]).reshape(-1)
    return rows


def _fresh_blocks(plan: StepPlan) -> Indices:
    """Blocks that this step begins and leaves unfilled: what they held before must not be read as values."""
    return np.array(
        [
            row.block_table[end // BLOCK_TOKENS]
            for row in plan.rows
            if (end := row.start + row.count) % BLOCK_TOKENS and floor_to_block(end) >= row.start
        ],
        dtype=np.int64,
    )


def _conv_layout(
    starts: Indices, counts: Indices, firsts: Indices, slots: Indices, row_of_token: Indices, width: int
) -> ConvLayout:
    bases = firsts + width * np.arange(len(counts))
    window = np.arange(width)
    outputs = np.arange(counts.sum()) + (bases - firsts)[row_of_token]
    boundaries = (starts + counts) // BLOCK_TOKENS * BLOCK_TOKENS
    reached = np.flatnonzero(boundaries >= starts)
    boundary_rows = (bases + boundaries - starts)[reached]
    return ConvLayout(
        num_rows=int(counts.sum()) + width * len(counts),
        token_rows=to_index(outputs + width),
        carry_rows=to_index((bases[:, None] + window).reshape(-1)),
        tail_rows=to_index(((bases + counts)[:, None] + window).reshape(-1)),
        outputs=to_index(outputs),
        boundary_slots=to_index(slots[reached]),
        boundary_rows=to_index((boundary_rows[:, None] + window).reshape(-1)),
    )


def _captures(plan: StepPlan, firsts: Indices, tiles: TileLayout | None, width: int) -> tuple[Capture, ...]:
    batch_index = {row: i for i, row in enumerate(tiles.plan_rows)} if tiles else {}
    captures = []
    for index, row in enumerate(plan.rows):
        for position in row.checkpoint_after:
            ordinal = position // BLOCK_TOKENS - row.start // BLOCK_TOKENS - 1 if index in batch_index else None
            conv_row = int(firsts[index]) + width * index + position - row.start
            captures.append(Capture(index, position, ordinal, batch_index.get(index, 0), conv_row))
    return tuple(captures)
