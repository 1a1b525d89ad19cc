"""Owns how queries are grouped into tiles and which KV pages each tile reads. Knows no weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from warmstate.kernels.attention_torch import KeyTile, QueryTiles
from warmstate.models.backend import BLOCK_TOKENS, PlanRow, StepPlan, blocks_for

Indices = npt.NDArray[np.int64]

KEY_TILE_TOKENS = 512
DECODE_KEY_TILE_TOKENS = 2048
"""Rows of one token have small products, so outside deterministic mode they read up to so many keys at a time."""

_SHORT_ROWS, _LONG_ROWS = 64, 256

_MAX_SCORES = 1 << 19
"""Scores computed at a time: 2 MiB of float32 stay in the cache through the passes of the softmax."""


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Sizes of a group: rows per query tile, tokens per key tile, and how many query tiles go together."""

    num_rows: int
    key_tile: int
    num_kv_heads: int
    least_tiles: int
    most_tiles: int


def build_query_tiles(
    plan: StepPlan, firsts: Indices, num_heads: int, num_kv_heads: int, deterministic: bool
) -> tuple[QueryTiles, ...]:
    """Groups of query tiles: those of the plan rows of few tokens, and those of the others.

    In deterministic mode a product has a multiple of 16 rows and keys come in tiles of 512: the order of summation, and
    so every bit, is then the same for any grouping (see `linear_torch.ROW_QUANTUM`). A batch of one product is padded
    to two, because MKL may cut a lone product along the sum when it has three threads or more.
    """
    least_tiles = -(-2 // num_kv_heads) if deterministic else 1
    few_rows = 16 // math.gcd(16, num_heads // num_kv_heads) if deterministic else 1

    def tiling(num_rows: int, key_tile: int) -> _Tiling:
        most_tiles = max(1, _MAX_SCORES // (num_rows * num_heads * key_tile))
        return _Tiling(num_rows, key_tile, num_kv_heads, least_tiles, most_tiles)

    few = [i for i, row in enumerate(plan.rows) if row.count <= few_rows]
    many = [i for i, row in enumerate(plan.rows) if row.count > few_rows]
    groups: list[QueryTiles] = []
    if few:
        num_keys = max(plan.rows[i].start + plan.rows[i].count for i in few)
        groups += _groups(plan.rows, few, firsts, tiling(few_rows, _few_rows_key_tile(num_keys, deterministic)))
    if many:
        longest = max(plan.rows[i].count for i in many)
        num_rows = _SHORT_ROWS if longest <= _SHORT_ROWS else _LONG_ROWS
        groups += _groups(plan.rows, many, firsts, tiling(num_rows, KEY_TILE_TOKENS))
    return tuple(groups)


def _few_rows_key_tile(num_keys: int, deterministic: bool) -> int:
    """`num_keys` is how many the row with most of them sees."""
    if deterministic:
        return KEY_TILE_TOKENS
    return min(DECODE_KEY_TILE_TOKENS, blocks_for(num_keys) * BLOCK_TOKENS)


def _groups(rows: Sequence[PlanRow], members: list[int], firsts: Indices, tiling: _Tiling) -> list[QueryTiles]:
    """Query tiles of the plan rows `members`, those that see most keys first, so many at a time as go together."""
    tiles = [(i, offset) for i in members for offset in range(0, rows[i].count, tiling.num_rows)]
    tiles.sort(key=lambda tile: -_last_position(rows[tile[0]], tile[1], tiling.num_rows))
    starts = range(0, len(tiles), tiling.most_tiles)
    return [_group(rows, tiles[start : start + tiling.most_tiles], firsts, tiling) for start in starts]


def _group(rows: Sequence[PlanRow], tiles: list[tuple[int, int]], firsts: Indices, tiling: _Tiling) -> QueryTiles:
    num_real = len(tiles)
    tiles = tiles + tiles[-1:] * (tiling.least_tiles - num_real)
    row_of_tile = np.array([i for i, _ in tiles], dtype=np.int64)
    offsets = np.array([offset for _, offset in tiles], dtype=np.int64)
    counts = np.array([rows[i].count for i, _ in tiles], dtype=np.int64)
    starts = np.array([rows[i].start for i, _ in tiles], dtype=np.int64)
    within = offsets[:, None] + np.arange(tiling.num_rows)
    real = within < counts[:, None]
    real[num_real:] = False
    real_rows = np.flatnonzero(real.reshape(-1))
    within = np.minimum(within, counts[:, None] - 1)
    tokens = (firsts[row_of_tile][:, None] + within).reshape(-1)
    num_key_tiles = (starts + within[:, -1]) // tiling.key_tile + 1
    pages = _pages(rows, row_of_tile, int(num_key_tiles[0]), tiling)
    return QueryTiles(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(starts[:, None] + within),
        rows=torch.from_numpy(real_rows),
        row_tokens=torch.from_numpy(tokens[real_rows]),
        key_tiles=tuple(
            KeyTile(
                start=j * tiling.key_tile,
                num_query_tiles=(num := max(tiling.least_tiles, int((num_key_tiles > j).sum()))),
                pages=torch.from_numpy(pages[j, :num].reshape(-1)),
                masked=bool((starts + offsets)[:num].min() < (j + 1) * tiling.key_tile - 1),
            )
            for j in range(int(num_key_tiles[0]))
        ),
    )


def _last_position(row: PlanRow, offset: int, num_rows: int) -> int:
    return row.start + min(offset + num_rows, row.count) - 1


def _pages(rows: Sequence[PlanRow], row_of_tile: Indices, num_key_tiles: int, tiling: _Tiling) -> Indices:
    """[key tiles, query tiles, kv heads, pages per tile]; page 0 where a sequence has no more."""
    per_tile = tiling.key_tile // BLOCK_TOKENS
    tables = np.zeros((len(row_of_tile), num_key_tiles * per_tile), dtype=np.int64)
    for i, index in enumerate(row_of_tile):
        num_blocks = min(blocks_for(rows[index].start + rows[index].count), tables.shape[1])
        tables[i, :num_blocks] = rows[index].block_table[:num_blocks]
    blocks = tables.reshape(len(row_of_tile), num_key_tiles, 1, per_tile).transpose(1, 0, 2, 3)
    pages: Indices = blocks * tiling.num_kv_heads + np.arange(tiling.num_kv_heads)[:, None]
    return pages
