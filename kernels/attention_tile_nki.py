"""Owns the tiles of keys and values of `attention_d256_nki`: from pages or from the chunk, keys turned around."""

from abc import ABC, abstractmethod
from typing import Any

import nki.isa as nisa
import nki.language as nl

BLOCK = 128
KEYS = 512
"""Keys of a tile of the chunk itself; one of pages has up to ROW_TOKENS * 128."""

ROW_TOKENS = 8
"""Adjacent tokens of a page that are gathered as one row, so that one instruction gathers a tile of 128 rows."""

MAX_EXACT = 2**24
"""Row numbers are computed in float32, which holds integers up to here."""


class Tables:
    """Where the cached tokens of B sequences lie, and how many count.

    A tile has up to 128 rows of ROW_TOKENS tokens. `rows` [128, B, tiles] uint32 numbers them in the pages of head 0,
    outside of the cache for entries out of range; `limits` [128, B, tiles] float32 are how many tokens of a tile count,
    and `positions` [128, keys] float32, by the rows of a tile, the order of its keys, the same in every partition.
    """

    def __init__(self, pages: Any, block_tables: Any, lengths: Any) -> None:
        """`pages` [N, Hk, P, D], `block_tables` [B, M] int32, `lengths` [B, 1] int32."""
        num_pages, k_heads, page_tokens, width = pages.shape
        num_sequences, num_entries = block_tables.shape
        assert BLOCK % page_tokens == 0, f"pages of {page_tokens} tokens do not divide {BLOCK}"
        self.row_tokens: int = min(ROW_TOKENS, page_tokens)
        while self.row_tokens > 1 and num_entries * page_tokens <= self.row_tokens // 2 * BLOCK:
            self.row_tokens //= 2
        self.page_rows: int = page_tokens // self.row_tokens
        self.tile_pages: int = BLOCK // self.page_rows
        self.num_entries: int = num_entries
        self.width: int = width
        self.num_tiles: int = -(-num_entries // self.tile_pages)
        num_rows = num_pages * k_heads * self.page_rows
        assert num_rows < MAX_EXACT, f"{num_pages} pages of {k_heads} heads: at most {MAX_EXACT} rows"
        shape = (BLOCK, num_sequences, self.num_tiles)
        rows = nl.ndarray(shape, nl.int32)
        if num_entries % self.tile_pages:
            # What the last tile does not have is computed with the rest, and not gathered.
            nisa.memset(rows, 0)
        for i in range(min(self.tile_pages, num_entries)):
            count = -(-(num_entries - i) // self.tile_pages)
            pattern = [[0, self.page_rows], [num_entries, num_sequences], [self.tile_pages, count]]
            target = rows[i * self.page_rows : (i + 1) * self.page_rows, :, 0:count]
            nisa.dma_copy(target, block_tables.ap(pattern, offset=i))
        counts = nl.ndarray((BLOCK, num_sequences, 1), nl.int32)
        nisa.dma_copy(counts, lengths.ap([[0, BLOCK], [1, num_sequences]]))
        within, starts = self._prepare_positions()
        # An entry out of range becomes one just outside, so that the numbers of its rows fit 32 bits.
        nisa.tensor_scalar(rows, rows, nl.minimum, float(num_pages), op1=nl.maximum, operand1=-1.0)
        stride = float(k_heads * self.page_rows)
        nisa.tensor_scalar(rows, rows, nl.multiply, stride, op1=nl.add, operand1=within)
        # Negative numbers are large ones here, and so outside as well.
        self.rows = rows.view(nl.uint32)
        self.limits = nl.ndarray(shape, nl.float32)
        limit = counts.broadcast(2, self.num_tiles)
        nisa.tensor_tensor(self.limits, limit, nl.broadcast_to(starts, shape), nl.subtract)

    def _prepare_positions(self) -> tuple[Any, Any]:
        """What needs no table: the row within the page [128, 1], and where tiles start [128, 1, tiles], float32."""
        partition, within = nl.ndarray((BLOCK, 1), nl.int32), nl.ndarray((BLOCK, 1), nl.float32)
        nisa.iota(partition, [[0, 1]], channel_multiplier=1)
        nisa.tensor_scalar(partition, partition, nl.bitwise_and, self.page_rows - 1)
        nisa.tensor_copy(within, partition)
        starts = nl.ndarray((BLOCK, 1, self.num_tiles), nl.float32)
        nisa.iota(starts, [[BLOCK * self.row_tokens, self.num_tiles]])
        self.positions: dict[int, Any] = {}
        for rows in {self.num_rows(tile) for tile in range(self.num_tiles)}:
            self.positions[rows] = nl.ndarray((BLOCK, rows * self.row_tokens), nl.float32)
            nisa.iota(self.positions[rows], [[1, self.row_tokens], [self.row_tokens, rows]])
        return within, starts

    def num_rows(self, tile: int) -> int:
        """Rows of a tile that the block table reaches."""
        return min(self.tile_pages, self.num_entries - tile * self.tile_pages) * self.page_rows


class KeyTile(ABC):
    """Keys [128, D / 128, count] with their dimensions on the partitions, and values by blocks of at most 128 keys.

    `start` is the position of the first, counted from the chunk's own; a tile of pages has a mask `seen` instead.
    `begin` starts the transfers, `finish` turns the keys around; both do nothing the second time.
    """

    def __init__(self, count: int, start: int = 0) -> None:
        self.count, self.start = count, start
        self.key_t: Any = None
        self.seen: Any = None
        self.keys: list[Any] = []
        self.values: list[Any] = []

    def begin(self) -> None:
        if not self.values:
            self.load()

    @abstractmethod
    def load(self) -> None:
        """Begins the transfers into `keys` and `values`."""

    def finish(self) -> None:
        if self.key_t is None:
            self.key_t = turned(self.keys)
            self.keys = []


class OwnTile(KeyTile):
    """Keys and values [T, D] of the chunk itself, from `start`."""

    def __init__(self, key: Any, value: Any, start: int) -> None:
        super().__init__(min(KEYS, key.shape[0] - start), start)
        self._key, self._value = key, value

    def load(self) -> None:
        last = self.start + self.count
        for base in range(self.start, last, BLOCK):
            rows = slice(base, min(base + BLOCK, last))
            self.keys.append(nl.load(self._key[rows]))
            self.values.append(nl.load(self._value[rows]))


class PagedTile(KeyTile):
    """Keys and values of one sequence and head from pages; block j holds token j of every row."""

    def __init__(self, tables: Tables, pages: tuple[Any, Any], sequence: int, head: int, tile: int) -> None:
        """`pages` are those of keys and of values."""
        self._rows = tables.num_rows(tile)
        super().__init__(self._rows * tables.row_tokens)
        self._tables, self._pages, self._sequence, self._head, self._tile = tables, pages, sequence, head, tile

    def load(self) -> None:
        """Zeros where the table's entry is out of range."""
        tables = self._tables
        shape = (self._rows, tables.row_tokens, tables.width)
        tiles = [nl.ndarray(shape, pages.dtype) for pages in self._pages]
        for tile in tiles:
            nisa.memset(tile.view(nl.float32), 0.0)
        for tile, pages in zip(tiles, self._pages, strict=True):
            self._gather(tile, pages)
        self.keys, self.values = ([tile[:, j] for j in range(tables.row_tokens)] for tile in tiles)
        self.seen = nl.ndarray((BLOCK, self.count), nl.uint8)
        limit = tables.limits[:, self._sequence, self._tile : self._tile + 1]
        nisa.tensor_scalar(self.seen, tables.positions[self._rows], nl.less, limit)

    def _gather(self, tile: Any, pages: Any) -> None:
        tables = self._tables
        tokens, width = tables.row_tokens, tables.width
        num_pages, k_heads, page_tokens, _ = pages.shape
        rows = pages.reshape((num_pages * k_heads * page_tokens // tokens, tokens * width))
        pattern = [[tokens * width, self._rows], [width, tokens], [1, width]]
        at = tables.rows[0 : self._rows, self._sequence, self._tile : self._tile + 1]
        offset = self._head * tables.page_rows * tokens * width
        nisa.dma_copy(tile, rows.ap(pattern, offset=offset, vector_offset=at), oob_mode=nisa.oob_mode.skip)


def turned(blocks: list[Any]) -> Any:
    """[128, D / 128, rows of all blocks] of `blocks` [rows, D], with the dimensions on the partitions."""
    count, width = sum(block.shape[0] for block in blocks), blocks[0].shape[1]
    shape, dtype = (BLOCK, width // BLOCK, count), blocks[0].dtype
    target = nl.ndarray(shape, dtype)
    for part in range(width // BLOCK):
        columns, base = nl.ndarray((BLOCK, count), dtype, buffer=nl.psum), 0
        for block in blocks:
            own = slice(base, base + block.shape[0])
            nisa.nc_transpose(columns[:, own], block[:, part * BLOCK : (part + 1) * BLOCK])
            base = own.stop
        # The engines share the copies.
        engine = nisa.engine.vector if part % 2 else nisa.engine.scalar
        nisa.tensor_copy(target[:, part], columns, engine=engine)
    return target
