"""Owns how queries are grouped into tiles and which KV pages each tile reads. Knows no weights."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from warmstate.kernels.attention_torch import KeyTile, QueryTiles
from warmstate.models.backend import BLOCK_TOKENS, PlanRow, StepPlan

Indices = npt.NDArray[np.int64]

KEY_TILE_TOKENS = 512
DECODE_KEY_TILE_TOKENS = 2048
"""Rows of one token have small products, so outside deterministic mode they read more keys at a time."""

_SHORT_ROWS, _LONG_ROWS = 64, 256


def build_query_tiles(
    plan: StepPlan, firsts: Indices, num_heads: int, num_kv_heads: int, deterministic: bool
) -> tuple[QueryTiles, ...]:
    """One group of query tiles for the plan rows of few tokens, one for the others.

    In deterministic mode a product has a multiple of 16 rows and keys come in tiles of 512: the order of summation, and
    so every bit, is then the same for any grouping (see `linear_torch.ROW_QUANTUM`). A batch of one product is padded
    to two, because MKL may cut a lone product along the sum when it has three threads or more.
    """
    least_tiles = -(-2 // num_kv_heads) if deterministic else 1
    few_rows = 16 // math.gcd(16, num_heads // num_kv_heads) if deterministic else 1
    few = [i for i, row in enumerate(plan.rows) if row.count <= few_rows]
    many = [i for i, row in enumerate(plan.rows) if row.count > few_rows]
    groups = []
    if few:
        key_tile = KEY_TILE_TOKENS if deterministic else DECODE_KEY_TILE_TOKENS
        groups.append(_group(plan.rows, few, firsts, few_rows, num_kv_heads, key_tile, least_tiles))
    if many:
        longest = max(plan.rows[i].count for i in many)
        num_rows = _SHORT_ROWS if longest <= _SHORT_ROWS else _LONG_ROWS
        groups.append(_group(plan.rows, many, firsts, num_rows, num_kv_heads, KEY_TILE_TOKENS, least_tiles))
    return tuple(groups)


def _group(
    rows: Sequence[PlanRow],
    members: list[int],
    firsts: Indices,
    num_rows: int,
    num_kv_heads: int,
    key_tile: int,
    least_tiles: int,
) -> QueryTiles:
    tiles = [(i, offset) for i in members for offset in range(0, rows[i].count, num_rows)]
    num_real = len(tiles)
    tiles += tiles[:1] * (least_tiles - num_real)
    tiles.sort(key=lambda tile: -_last_position(rows[tile[0]], tile[1], num_rows))
    row_of_tile = np.array([i for i, _ in tiles], dtype=np.int64)
    offsets = np.array([offset for _, offset in tiles], dtype=np.int64)
    counts = np.array([rows[i].count for i, _ in tiles], dtype=np.int64)
    starts = np.array([rows[i].start for i, _ in tiles], dtype=np.int64)
    within = offsets[:, None] + np.arange(num_rows)
    real = within < counts[:, None]
    real[num_real:] = False
    within = np.minimum(within, counts[:, None] - 1)
    tokens = (firsts[row_of_tile][:, None] + within).reshape(-1)
    last = starts + np.minimum(offsets + num_rows, counts) - 1
    num_key_tiles = last // key_tile + 1
    pages = _pages(rows, row_of_tile, int(num_key_tiles[0]), num_kv_heads, key_tile)
    return QueryTiles(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(starts[:, None] + within),
        rows=torch.from_numpy(np.flatnonzero(real.reshape(-1))),
        row_tokens=torch.from_numpy(tokens[real.reshape(-1)]),
        key_tiles=tuple(
            KeyTile(
                start=j * key_tile,
                num_query_tiles=(num := max(least_tiles, int((num_key_tiles > j).sum()))),
                pages=torch.from_numpy(pages[j, :num].reshape(-1)),
                masked=bool((starts + offsets)[:num].min() < (j + 1) * key_tile - 1),
            )
            for j in range(int(num_key_tiles[0]))
        ),
    )


def _last_position(row: PlanRow, offset: int, num_rows: int) -> int:
    return row.start + min(offset + num_rows, row.count) - 1


def _pages(
    rows: Sequence[PlanRow], row_of_tile: Indices, num_key_tiles: int, num_kv_heads: int, key_tile: int
) -> Indices:
    """[key tiles, query tiles, kv heads, pages per tile]; page 0 where a sequence has no more blocks."""
    per_tile = key_tile // BLOCK_TOKENS
    tables = np.zeros((len(row_of_tile), num_key_tiles * per_tile), dtype=np.int64)
    for i, index in enumerate(row_of_tile):
        row = rows[index]
        num_blocks = -(-(row.start + row.count) // BLOCK_TOKENS)
        tables[i, :num_blocks] = row.block_table[:num_blocks]
    blocks = tables.reshape(len(row_of_tile), num_key_tiles, 1, per_tile).transpose(1, 0, 2, 3)
    pages: Indices = blocks * num_kv_heads + np.arange(num_kv_heads)[:, None]
    return pages
