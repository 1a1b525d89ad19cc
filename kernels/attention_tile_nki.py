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
"""What a key that a query does not see scores: exp(scale * (MASKED - maximum)) is 0."""


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
        self._scores: Any = None
        self._peak: Any = None
        self._neg_top: Any = None
        self._shrink: Any = None
        self._weights: Any = None
        self._weights_t: list[Any] = []
        nisa.memset(self._maximum, LEAST)
        nisa.memset(self._total, 0.0)
        nisa.memset(self._values, 0.0)

    def score(self, tile: KeyTile, diagonal: int | None) -> None:
        """Scores [rows, keys], not yet scaled; row r sees the keys up to r + diagonal, or those that the tile says.

        A select removes the others, so that nothing they hold gets through. Without a mask they stay in PSUM.
        """
        shape = (self._rows, tile.count)
        products = nl.ndarray(shape, nl.float32, buffer=nl.psum)
        for part in range(self._width // BLOCK):
            nisa.nc_matmul(products, self._query_t[:, part], tile.key_t[:, part], accumulate=part > 0)
        self._scores = products
        if tile.seen is not None:
            self._scores = nl.ndarray(shape, nl.float32)
            nisa.select_reduce(self._scores, tile.seen[0 : self._rows], products, MASKED)
        elif diagonal is not None and diagonal < tile.count - 1:
            plain = nl.ndarray(shape, nl.float32)
            nisa.tensor_copy(plain, products, engine=nisa.engine.scalar)
            self._scores = nl.ndarray(shape, nl.float32)
            pattern = [[-1, tile.count]]
            nisa.affine_select(self._scores, pattern, 1, plain, MASKED, cmp_op=nl.greater_equal, offset=diagonal)

    def find_peak(self) -> None:
        """The largest score of each row."""
        self._peak = nl.ndarray((self._rows, 1), nl.float32)
        nisa.tensor_reduce(self._peak, nl.maximum, self._scores, axis=1)

    def raise_maximum(self) -> None:
        """The new maximum, and by how much the sums so far shrink."""
        scale = self._tables.scale
        top, self._neg_top = nl.ndarray((self._rows, 1), nl.float32), nl.ndarray((self._rows, 1), nl.float32)
        nisa.tensor_tensor(top, self._peak, self._maximum, nl.maximum)
        nisa.tensor_scalar(self._neg_top, top, nl.multiply, -scale)
        self._shrink = nl.ndarray((self._rows, 1), nl.float32)
        nisa.activation(self._shrink, nl.exp, self._maximum, bias=self._neg_top, scale=scale)
        self._maximum = top

    def soften(self, tile: KeyTile) -> None:
        """The weights exp(scale * (s - maximum)) and their sum."""
        self._weights = nl.ndarray((self._rows, tile.count), self._tables.dtype)
        added, total = nl.ndarray((self._rows, 1), nl.float32), nl.ndarray((self._rows, 1), nl.float32)
        scale = self._tables.scale
        nisa.activation_reduce(self._weights, nl.exp, self._scores, nl.add, added, bias=self._neg_top, scale=scale)
        nisa.scalar_tensor_tensor(total, self._total, nl.multiply, self._shrink, nl.add, added)
        self._total = total

    def turn_weights(self, tile: KeyTile) -> None:
        """The weights with the keys on the partitions, all blocks in one copy where they are full."""
        self._weights_t = []
        num_blocks = len(tile.values)
        turned = nl.ndarray((BLOCK, num_blocks, self._rows), self._tables.dtype, buffer=nl.psum)
        weights_t = nl.ndarray((BLOCK, num_blocks, self._rows), self._tables.dtype)
        for i, block in enumerate(tile.values):
            count = block.shape[0]
            nisa.nc_transpose(turned[0:count, i], self._weights[:, i * BLOCK : i * BLOCK + count])
            self._weights_t.append(weights_t[0:count, i])
        full = tile.count // BLOCK
        if full:
            nisa.tensor_copy(weights_t[:, 0:full], turned[:, 0:full], engine=nisa.engine.scalar)
        if full < num_blocks:
            count = tile.count - full * BLOCK
            nisa.tensor_copy(weights_t[0:count, full], turned[0:count, full], engine=nisa.engine.scalar)

    def weigh(self, tile: KeyTile) -> None:
        """Adds the weighted values of the tile."""
        weighted = nl.ndarray((self._rows, self._width), nl.float32, buffer=nl.psum)
        for i, block in enumerate(tile.values):
            nisa.nc_matmul(weighted, self._weights_t[i], block, accumulate=i > 0)
        values = nl.ndarray((self._rows, self._width), nl.float32)
        nisa.scalar_tensor_tensor(values, self._values, nl.multiply, self._shrink, nl.add, weighted)
        self._values = values

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


def add_tile(running: list[Running], diagonals: list[int | None], tile: KeyTile) -> None:
    """Adds a tile to several sets of queries step by step, so that each fills the waits of the others."""
    for queries, diagonal in zip(running, diagonals, strict=True):
        queries.score(tile, diagonal)
    for queries in running:
        queries.find_peak()
    for queries in running:
        queries.raise_maximum()
    for queries in running:
        queries.soften(tile)
    for queries in running:
        queries.turn_weights(tile)
    for queries in running:
        queries.weigh(tile)
