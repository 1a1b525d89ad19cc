"""Owns the tiles of `attention_d256_nki`: keys turned around, queries turned around, the running softmax."""

from typing import Any

import nki.isa as nisa
import nki.language as nl

BLOCK = 128
KEYS = 512
"""Keys of a tile: one bank of PSUM per query."""

LEAST = -1.0e30
"""Where a maximum starts: below any score, and its differences stay finite."""

MASKED = -3.0e38
"""What a key that a query does not see scores: exp(MASKED - maximum) is 0."""


class Tables:
    """What all tiles of one sequence share: the dtype, the block table, how much of it counts."""

    def __init__(self, dtype: Any, block_table: Any, prior_len: Any, scale: float, page_tokens: int) -> None:
        assert BLOCK % page_tokens == 0, f"pages of {page_tokens} tokens do not divide {BLOCK}"
        self.dtype, self.scale = dtype, scale
        self.num_prior = block_table.shape[0] * page_tokens
        self.entries = nl.ndarray((1, block_table.shape[0]), nl.int32)
        nisa.dma_copy(self.entries, block_table)
        length = nl.ndarray((BLOCK, 1), nl.int32)
        nisa.dma_copy(length, prior_len.ap([[0, BLOCK], [1, 1]]))
        self.length = nl.ndarray((BLOCK, 1), nl.float32)
        nisa.tensor_copy(self.length, length)


class KeyTile:
    """Keys [128, D / 128, count] with their dimensions on the partitions, and values by blocks of 128 keys."""

    def __init__(self, start: int, count: int, key_t: Any, values: list[Any], seen: Any) -> None:
        self.start, self.count, self.key_t, self.values, self.seen = start, count, key_t, values, seen


def load_keys(tables: Tables, key: Any, value: Any, start: int) -> KeyTile:
    """The tile of keys from `start` of `key`, `value` [T, D]."""
    num_tokens, width = key.shape
    count = min(KEYS, num_tokens - start)
    key_t = nl.ndarray((BLOCK, width // BLOCK, count), tables.dtype)
    values = []
    for base in range(0, count, BLOCK):
        rows = slice(start + base, start + min(base + BLOCK, count))
        _turn(key_t[:, :, base : min(base + BLOCK, count)], nl.load(key[rows]))
        values.append(nl.load(value[rows]))
    return KeyTile(start, count, key_t, values, None)


def load_paged(tables: Tables, key_pages: Any, value_pages: Any, head: int, start: int) -> KeyTile:
    """The tile of keys from position `start` of the block table, and which of them count."""
    page_tokens, width = key_pages.shape[2:]
    count = min(KEYS, tables.num_prior - start)
    key_t = nl.ndarray((BLOCK, width // BLOCK, count), tables.dtype)
    values = []
    for base in range(0, count, BLOCK):
        rows = min(BLOCK, count - base)
        first_entry = (start + base) // page_tokens
        _turn(key_t[:, :, base : base + rows], _gather(tables, key_pages, head, first_entry, rows))
        values.append(_gather(tables, value_pages, head, first_entry, rows))
    positions, seen = nl.ndarray((BLOCK, count), nl.float32), nl.ndarray((BLOCK, count), nl.uint8)
    nisa.iota(positions, [[1, count]], offset=start)
    nisa.tensor_scalar(seen, positions, nl.less, tables.length)
    return KeyTile(start, count, key_t, values, seen)


def _gather(tables: Tables, pages: Any, head: int, first_entry: int, rows: int) -> Any:
    """[rows, D] of consecutive table entries, each page at a run-time address."""
    page_tokens, width = pages.shape[2:]
    tile = nl.ndarray((rows, width), tables.dtype)
    nisa.memset(tile, 0.0)
    for i in range(rows // page_tokens):
        entry = tables.entries[:, first_entry + i : first_entry + i + 1]
        pattern = [[width, page_tokens], [1, width]]
        page = pages.ap(pattern, offset=head * page_tokens * width, scalar_offset=entry, indirect_dim=0)
        nisa.dma_copy(tile[i * page_tokens : (i + 1) * page_tokens], page, oob_mode=nisa.oob_mode.skip)
    return tile


def _turn(target: Any, rows: Any) -> None:
    """target [128, D / 128, rows] = rows [rows, D] with the dimensions on the partitions."""
    count, width = rows.shape
    for part in range(width // BLOCK):
        turned = nl.ndarray((BLOCK, count), rows.dtype, buffer=nl.psum)
        nisa.nc_transpose(turned, rows[:, part * BLOCK : (part + 1) * BLOCK])
        nisa.tensor_copy(target[:, part], turned, engine=nisa.engine.scalar)


def load_queries(tables: Tables, query: Any) -> Any:
    """[128, D / 128, rows] of `query` [rows, D]."""
    count, width = query.shape
    query_t = nl.ndarray((BLOCK, width // BLOCK, count), tables.dtype)
    _turn(query_t, nl.load(query))
    return query_t


class Running:
    """The running maximum, sum and weighted values of up to 128 queries."""

    def __init__(self, tables: Tables, query_t: Any, rows: int, width: int) -> None:
        self._tables, self._query_t, self._rows, self._width = tables, query_t, rows, width
        self._maximum, self._total = nl.ndarray((rows, 1), nl.float32), nl.ndarray((rows, 1), nl.float32)
        self._values = nl.ndarray((rows, width), nl.float32)
        nisa.memset(self._maximum, LEAST)
        nisa.memset(self._total, 0.0)
        nisa.memset(self._values, 0.0)

    def add(self, tile: KeyTile, diagonal: int | None) -> None:
        """Adds a tile; query row r sees its keys up to r + diagonal, or those that the tile says."""
        scores = self._scores(tile, diagonal)
        top, neg_top = nl.ndarray((self._rows, 1), nl.float32), nl.ndarray((self._rows, 1), nl.float32)
        nisa.tensor_reduce(top, nl.maximum, scores, axis=1)
        nisa.tensor_tensor(top, top, self._maximum, nl.maximum)
        nisa.tensor_scalar(neg_top, top, nl.multiply, -1.0)
        weights = nl.ndarray((self._rows, tile.count), self._tables.dtype)
        added, shrink = nl.ndarray((self._rows, 1), nl.float32), nl.ndarray((self._rows, 1), nl.float32)
        nisa.activation_reduce(weights, nl.exp, scores, nl.add, added, bias=neg_top)
        nisa.activation(shrink, nl.exp, self._maximum, bias=neg_top)
        self._maximum = top
        total, values = nl.ndarray((self._rows, 1), nl.float32), nl.ndarray((self._rows, self._width), nl.float32)
        nisa.scalar_tensor_tensor(total, self._total, nl.multiply, shrink, nl.add, added)
        nisa.scalar_tensor_tensor(values, self._values, nl.multiply, shrink, nl.add, self._weighted(tile, weights))
        self._total, self._values = total, values

    def _scores(self, tile: KeyTile, diagonal: int | None) -> Any:
        """Scaled scores [rows, keys]; a select removes masked ones, so that nothing they hold gets through."""
        shape = (self._rows, tile.count)
        products = nl.ndarray(shape, nl.float32, buffer=nl.psum)
        for part in range(self._width // BLOCK):
            nisa.nc_matmul(products, self._query_t[:, part], tile.key_t[:, part], accumulate=part > 0)
        scores = nl.ndarray(shape, nl.float32)
        nisa.activation(scores, nl.copy, products, scale=self._tables.scale)
        if tile.seen is not None:
            kept = nl.ndarray(shape, nl.float32)
            nisa.select_reduce(kept, tile.seen[0 : self._rows], scores, MASKED)
            return kept
        if diagonal is not None and diagonal < tile.count - 1:
            kept = nl.ndarray(shape, nl.float32)
            nisa.affine_select(kept, [[-1, tile.count]], 1, scores, MASKED, cmp_op=nl.greater_equal, offset=diagonal)
            return kept
        return scores

    def _weighted(self, tile: KeyTile, weights: Any) -> Any:
        """PSUM [rows, D]: the weights, turned around block by block, times the values."""
        result = nl.ndarray((self._rows, self._width), nl.float32, buffer=nl.psum)
        for i, block in enumerate(tile.values):
            count = block.shape[0]
            turned = nl.ndarray((count, self._rows), self._tables.dtype, buffer=nl.psum)
            nisa.nc_transpose(turned, weights[:, i * BLOCK : i * BLOCK + count])
            weights_t = nl.ndarray((count, self._rows), self._tables.dtype)
            nisa.tensor_copy(weights_t, turned, engine=nisa.engine.scalar)
            nisa.nc_matmul(result, weights_t, block, accumulate=i > 0)
        return result

    def store(self, out: Any, gate: Any) -> None:
        """out = values / total, times sigmoid(gate)."""
        share = nl.ndarray((self._rows, 1), nl.float32)
        nisa.reciprocal(share, self._total)
        result = nl.ndarray((self._rows, self._width), out.dtype)
        if gate is None:
            nisa.tensor_scalar(result, self._values, nl.multiply, share)
        else:
            opened = nl.ndarray((self._rows, self._width), nl.float32)
            nisa.activation(opened, nl.sigmoid, nl.load(gate))
            nisa.scalar_tensor_tensor(result, self._values, nl.multiply, share, nl.multiply, opened)
        nisa.dma_copy(out, result)
