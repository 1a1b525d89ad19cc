"""Owns the running softmax of `attention_d256_nki`: queries, what they add up, and in what order tiles are added."""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from warmstate.kernels.attention_tile_nki import BLOCK, KeyTile, turned

LEAST = -1.0e30
"""Where a maximum starts: below any score, and its differences stay finite."""

MASKED = -3.0e38
"""What a key that a query does not see scores: exp(scale * (MASKED - maximum)) is 0."""

BEGUN, PREPARED, TURNED, WEIGHED, STORED = 4, 2, -3, -5, -6
"""The stages of a piece, by how far it then is from the one that is scored: so far that engines need not wait."""

STAGES = (BEGUN, PREPARED, 0, TURNED, WEIGHED, STORED)
BANK = 512
"""Float32 of a bank of PSUM, within which a matmul writes."""


class Running:
    """Up to 128 queries: their maximum (as -scale * maximum), their sum, their weighted values."""

    def __init__(self, query: Any, scale: float, out: Any, gate: Any) -> None:
        """`query`, `out`, `gate` [rows, D] in HBM."""
        self.rows, self.width = query.shape
        self.dtype, self.scale = query.dtype, scale
        self.query_t: Any = None
        self.neg_top: Any = None
        self.total: Any = None
        self.values: Any = None
        self._query, self._out, self._gate = query, out, gate
        self._loaded: Any = None

    def begin(self) -> None:
        if self._loaded is None:
            self._loaded = nl.load(self._query)
            self._gate = None if self._gate is None else nl.load(self._gate)

    def finish(self) -> None:
        if self.query_t is None:
            self.query_t = turned([self._loaded])

    def store(self) -> None:
        """out = values / total, times sigmoid(gate)."""
        share = nl.ndarray((self.rows, 1), nl.float32)
        nisa.reciprocal(share, self.total)
        result = nl.ndarray((self.rows, self.width), self.dtype)
        if self._gate is None:
            nisa.activation(result, nl.copy, self.values, scale=share)
        else:
            opened, divided = (nl.ndarray((self.rows, self.width), nl.float32) for _ in range(2))
            nisa.activation(opened, nl.sigmoid, self._gate)
            nisa.activation(divided, nl.copy, self.values, scale=share)
            nisa.tensor_tensor(result, divided, opened, nl.multiply, engine=nisa.engine.gpsimd)
        nisa.dma_copy(self._out, result)


class Piece:
    """One tile for one set of queries; row r sees the keys up to r + diagonal, or those that the tile says.

    Keys after those that the last row sees are left out.
    """

    def __init__(self, running: Running, tile: KeyTile, diagonal: int | None = None) -> None:
        self.running, self.tile, self.diagonal = running, tile, diagonal
        self.count = tile.count if diagonal is None else min(tile.count, diagonal + running.rows)
        self.is_last = False
        self._scores: Any = None
        self._peak: Any = None
        self._weights: Any = None
        self._weights_t: list[Any] = []
        self._shrink: Any = None
        self._added: Any = None

    def begin(self) -> None:
        self.running.begin()
        self.tile.begin()

    def prepare(self) -> None:
        self.tile.finish()
        self.running.finish()

    def score(self) -> None:
        """Scores [rows, keys] in PSUM, not yet scaled."""
        self._scores = nl.ndarray((self.running.rows, self.count), nl.float32, buffer=nl.psum)
        for part in range(self.running.width // BLOCK):
            for own in _halves(self.count):
                keys = self.tile.key_t[:, part, own]
                nisa.nc_matmul(self._scores[:, own], self.running.query_t[:, part], keys, accumulate=part > 0)

    def find_peak(self, triangle: Any) -> None:
        """The largest score of each row.

        A select removes the keys that are not seen, so that nothing they hold gets through. `triangle` [128, 128] uint8
        is 1 where the column is at most the row.
        """
        running, peak = self.running, nl.ndarray((self.running.rows, 1), nl.float32)
        self._peak = peak
        if self.tile.seen is not None:
            seen, command = self.tile.seen[0 : running.rows], nisa.reduce_cmd.reset_reduce
            nisa.select_reduce(self._scores, seen, self._scores, MASKED, reduce_res=peak, reduce_cmd=command)
        else:
            if self.diagonal is not None and self.diagonal < self.count - 1:
                border = self._scores[:, self.diagonal : self.count]
                nisa.select_reduce(border, triangle[0 : running.rows, 0 : border.shape[1]], border, MASKED)
            nisa.tensor_reduce(peak, nl.maximum, self._scores, axis=1)

    def raise_maximum(self) -> None:
        """The new maximum, and by how much the sums so far shrink."""
        running, peak = self.running, self._peak
        before, running.neg_top = running.neg_top, nl.ndarray((running.rows, 1), nl.float32)
        if before is None:
            least = -running.scale * LEAST
            nisa.tensor_scalar(running.neg_top, peak, nl.multiply, -running.scale, op1=nl.minimum, operand1=least)
            return
        nisa.scalar_tensor_tensor(running.neg_top, peak, nl.multiply, -running.scale, nl.minimum, before)
        self._shrink = nl.ndarray((running.rows, 1), nl.float32)
        nisa.activation(self._shrink, nl.exp, before, bias=running.neg_top, scale=-1.0)

    def soften(self) -> None:
        """The weights exp(scale * (s - maximum)) and their sum."""
        running = self.running
        self._weights = nl.ndarray((running.rows, self.count), running.dtype)
        self._added = nl.ndarray((running.rows, 1), nl.float32)
        keywords = {"bias": running.neg_top, "scale": running.scale}
        nisa.activation_reduce(self._weights, nl.exp, self._scores, nl.add, self._added, **keywords)

    def turn_weights(self) -> None:
        """The weights with the keys on the partitions, all full blocks in one copy."""
        sizes, base = [], 0
        for block in self.tile.values:
            sizes.append(min(block.shape[0], self.count - base))
            base += sizes[-1]
            if base == self.count:
                break
        shape = (BLOCK, len(sizes), self.running.rows)
        columns, weights_t = (
            nl.ndarray(shape, self.running.dtype, buffer=nl.psum),
            nl.ndarray(shape, self.running.dtype),
        )
        for i, size in enumerate(sizes):
            first = sum(sizes[:i])
            nisa.nc_transpose(columns[0:size, i], self._weights[:, first : first + size])
            self._weights_t.append(weights_t[0:size, i])
        same = sizes.count(sizes[0])
        own = slice(0, sizes[0])
        nisa.tensor_copy(weights_t[own, 0:same], columns[own, 0:same], engine=nisa.engine.scalar)
        if same < len(sizes):
            own = slice(0, sizes[-1])
            nisa.tensor_copy(weights_t[own, same], columns[own, same], engine=nisa.engine.scalar)

    def weigh(self) -> None:
        """Adds the sum and the weighted values of the tile to those so far."""
        running = self.running
        weighted = nl.ndarray((running.rows, running.width), nl.float32, buffer=nl.psum)
        for i, weights in enumerate(self._weights_t):
            for own in _halves(running.width):
                values = self.tile.values[i][0 : weights.shape[0], own]
                nisa.nc_matmul(weighted[:, own], weights, values, accumulate=i > 0)
        values = nl.ndarray((running.rows, running.width), nl.float32)
        if self._shrink is None:
            running.total = self._added
            nisa.tensor_copy(values, weighted)
        else:
            total = nl.ndarray((running.rows, 1), nl.float32)
            nisa.scalar_tensor_tensor(total, running.total, nl.multiply, self._shrink, nl.add, self._added)
            nisa.scalar_tensor_tensor(values, running.values, nl.multiply, self._shrink, nl.add, weighted)
            running.total = total
        running.values = values


def attend(pieces: list[Piece]) -> None:
    """Adds every piece, and stores each set of queries after its last.

    A piece is scored while the weights of an earlier one are used; pieces of one set of queries come in order.
    """
    positions = nl.ndarray((BLOCK, BLOCK), nl.float32)
    triangle = nl.ndarray((BLOCK, BLOCK), nl.uint8)
    nisa.iota(positions, [[-1, BLOCK]], channel_multiplier=1)
    nisa.tensor_scalar(triangle, positions, nl.greater_equal, 0.0)
    for piece in {id(piece.running): piece for piece in pieces}.values():
        piece.is_last = True
    for i in range(-BEGUN, len(pieces) - STORED):
        at = {stage: pieces[i + stage] for stage in STAGES if 0 <= i + stage < len(pieces)}
        if BEGUN in at:
            at[BEGUN].begin()
        if PREPARED in at:
            at[PREPARED].prepare()
        if STORED in at and at[STORED].is_last:
            at[STORED].running.store()
        if 0 in at:
            at[0].score()
        if TURNED in at:
            at[TURNED].turn_weights()
        if 0 in at:
            at[0].find_peak(triangle)
        if WEIGHED in at:
            at[WEIGHED].weigh()
        if 0 in at:
            at[0].raise_maximum()
            at[0].soften()


def _halves(count: int) -> list[slice]:
    """Two parts of an output, which matmuls take in turns: one that adds to what the last wrote would wait for it."""
    middle = BANK if count > BANK else -(-count // 2)
    return [slice(0, middle), slice(middle, count)] if middle < count else [slice(0, count)]
