"""Owns where tokens sit in the 64-row tiles of Gated DeltaNet. Knows no weights and no attention.

Tiles are anchored at absolute block boundaries: the token at position p is row p % 64 of its tile. A sequence that
starts within a block has leading rows that are no tokens of this step: zeros that change nothing, or in deterministic
mode the rows saved by the steps that computed them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from warmstate.kernels.gated_delta_torch import TILE_ROWS, TileOrdinal

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Tiles of the rows `plan_rows`, whose states are gathered from `slots` in that order.

    The `tokens` of the step go to the tile rows `rows`. Deterministic mode only: `lead_rows` are filled from the saved
    rows `lead_saved` (slot * 64 + row), and the rows `open_rows` of unfinished tiles are saved at `open_saved`.
    """

    plan_rows: tuple[int, ...]
    slots: torch.Tensor
    num_tiles: int
    ordinals: tuple[TileOrdinal, ...]
    tokens: torch.Tensor
    rows: torch.Tensor
    lead_rows: torch.Tensor
    lead_saved: torch.Tensor
    open_rows: torch.Tensor
    open_saved: torch.Tensor


def build_tile_layout(
    starts: Indices, counts: Indices, firsts: Indices, slots: Indices, tiled: Indices, keep_open: bool
) -> TileLayout:
    """Tiles the plan rows `tiled`; with `keep_open`, an unfinished tile does not advance the state."""
    ends = starts + counts
    first_block = starts // TILE_ROWS
    last_block = -(-ends // TILE_ROWS)
    closed = (ends // TILE_ROWS if keep_open else last_block) - first_block
    total = last_block - first_block
    # Longest first, an open tile before none: at every ordinal the sequences that still run are the first ones, and
    # among them those whose tile closes.
    order = tiled[np.lexsort((-total[tiled], -closed[tiled]))]
    closed, total = closed[order], total[order]
    ordinals = []
    num_tiles = 0
    for i in range(int(total.max())):
        ordinals.append(TileOrdinal(num_tiles, int((total > i).sum()), int((closed > i).sum())))
        num_tiles += ordinals[-1].num_tiles
    first_tiles = np.array([ordinal.first_tile for ordinal in ordinals])

    batch_of_token = np.repeat(np.arange(len(order)), counts[order])
    within = np.arange(len(batch_of_token)) - np.repeat(np.cumsum(counts[order]) - counts[order], counts[order])
    offsets = (starts % TILE_ROWS)[order][batch_of_token] + within
    rows = (first_tiles[offsets // TILE_ROWS] + batch_of_token) * TILE_ROWS + offsets % TILE_ROWS
    tokens = firsts[order][batch_of_token] + within
    token_slots, token_blocks = slots[order][batch_of_token], first_block[order][batch_of_token]
    in_open_tile = np.flatnonzero(
        keep_open & (token_blocks + offsets // TILE_ROWS == (ends // TILE_ROWS)[order][batch_of_token])
    )
    leads = (starts % TILE_ROWS)[order] * keep_open
    batch_of_lead = np.repeat(np.arange(len(order)), leads)
    lead = np.arange(len(batch_of_lead)) - np.repeat(np.cumsum(leads) - leads, leads)
    return TileLayout(
        plan_rows=tuple(int(row) for row in order),
        slots=torch.from_numpy(slots[order]),
        num_tiles=num_tiles,
        ordinals=tuple(ordinals),
        tokens=torch.from_numpy(tokens),
        rows=torch.from_numpy(rows),
        lead_rows=torch.from_numpy(batch_of_lead * TILE_ROWS + lead),
        lead_saved=torch.from_numpy(slots[order][batch_of_lead] * TILE_ROWS + lead),
        open_rows=torch.from_numpy(rows[in_open_tile]),
        open_saved=torch.from_numpy((token_slots * TILE_ROWS + offsets % TILE_ROWS)[in_open_tile]),
    )
