"""Owns the steps of the GDN decode on one group of (sequence, value head) pairs; `gdn_decode_nki` puts them in order.

Vectors are columns: [128, sequences, heads] tiles with the vector on the partitions.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

MAX_FLOAT32 = 3.0e38
PARTITIONS = 128


class Step:
    """The tiles of one token of a group."""

    kq: Any
    overlap: Any
    value: Any
    decay: Any
    beta: Any
    out: Any


class Batch:
    """A group of sequences and their states, [dk, heads, dv] float32 each."""

    def __init__(
        self, base: int, count: int, heads: tuple[int, int], dims: tuple[int, int], scale: float, eps: float, eye: Any
    ) -> None:
        """`heads` are the key and value heads, `dims` dk and dv."""
        self.base, self.count, self.scale, self.eps, self.eye = base, count, scale, eps, eye
        self.k_heads, self.v_heads = heads
        self.k_dim, self.v_dim = dims
        self.states: list[Any] = []
        self.slots: Any = None

    def solve(self, step: Step, own: slice) -> Any:
        """delta [dv, sequences, heads] of the sequences `own`, and their outputs."""
        ratio = self.v_heads // self.k_heads
        shape = (self.v_dim, own.stop - own.start, self.v_heads)
        read = nl.ndarray((*shape, 2), nl.float32, buffer=nl.psum)
        for i in range(own.start, own.stop):
            for head in range(self.v_heads):
                columns = step.kq[:, i, head // ratio]
                nisa.nc_matmul(read[:, i - own.start, head], self.states[i][:, head], columns, accumulate=False)
        decay = step.decay[0 : self.v_dim, own]
        asked, delta = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
        nisa.tensor_tensor(delta, read[:, :, :, 0], decay, nl.multiply)
        nisa.tensor_tensor(delta, step.value[:, own], delta, nl.subtract)
        nisa.tensor_tensor(delta, delta, step.beta[0 : self.v_dim, own], nl.multiply)
        nisa.tensor_tensor(asked, read[:, :, :, 1], decay, nl.multiply)
        out = step.out[:, own]
        nisa.tensor_tensor(out, step.overlap[:, own], delta, nl.multiply)
        nisa.tensor_tensor(out, out, asked, nl.add)
        return delta

    def write(self, step: Step, i: int, delta: Any) -> None:
        """S = exp(g) S + k^T delta of sequence i; `delta` [dv, heads] is spread over the partitions by the identity."""
        ratio = self.v_heads // self.k_heads
        before = self.states[i]
        after = nl.ndarray((self.k_dim, self.v_heads, self.v_dim), nl.float32)
        eye = self.eye[0 : self.v_dim, 0 : self.v_dim]
        for head in range(self.v_heads):
            spread = nl.ndarray((self.k_dim, self.v_dim), nl.float32, buffer=nl.psum)
            row = delta[:, head : head + 1].broadcast(1, self.k_dim)
            nisa.nc_matmul(spread, row, eye, is_moving_onezero=True)
            kept = nl.ndarray((self.k_dim, self.v_dim), nl.float32)
            nisa.activation(kept, nl.copy, before[:, head], scale=step.decay[0 : self.k_dim, i, head : head + 1])
            key = step.kq[:, i, head // ratio, 0:1]
            nisa.scalar_tensor_tensor(after[:, head], spread, nl.multiply, key, nl.add, kept)
        self.states[i] = after


def read_states(batch: Batch, states: Any, slots: Any) -> None:
    """Gathers the states of a group by slot; zeros where the slot is out of range."""
    batch.slots = nl.ndarray((1, batch.count), nl.int32)
    nisa.dma_copy(batch.slots, slots[batch.base : batch.base + batch.count])
    for i in range(batch.count):
        tile = nl.ndarray((batch.k_dim, batch.v_heads, batch.v_dim), nl.float32)
        nisa.memset(tile, 0.0)
        nisa.dma_copy(tile, _slot(batch, states, i), oob_mode=nisa.oob_mode.skip)
        batch.states.append(tile)


def write_state(batch: Batch, states: Any, i: int) -> None:
    """Scatters the state of sequence i back; nowhere where the slot is out of range."""
    nisa.dma_copy(_slot(batch, states, i), batch.states[i], oob_mode=nisa.oob_mode.skip)


def _slot(batch: Batch, states: Any, i: int) -> Any:
    """[dk, heads, dv] of the slot of sequence i, at a run-time address."""
    row = batch.v_heads * batch.v_dim
    pattern = [[row, batch.k_dim], [batch.v_dim, batch.v_heads], [1, batch.v_dim]]
    return states.ap(pattern, scalar_offset=batch.slots[:, i : i + 1], indirect_dim=0)


def _as_columns(batch: Batch, source: Any, rows: int, width: int, normalise: bool) -> Any:
    """PSUM [width, rows] float32 from `rows` vectors of HBM, normalised on the way where asked."""
    tile = nl.ndarray((rows, width), nl.float32)
    nisa.dma_copy(tile, source.reshape((rows, width)))
    if normalise:
        squares, total = nl.ndarray((rows, width), nl.float32), nl.ndarray((rows, 1), nl.float32)
        nisa.activation_reduce(squares, nl.square, tile, nl.add, total)
        nisa.activation(total, nl.rsqrt, total, bias=batch.eps)
        nisa.tensor_scalar(tile, tile, nl.multiply, total)
    turned = nl.ndarray((width, rows), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(turned, tile)
    return turned


def load_token(batch: Batch, step: Step, query: Any, key: Any, value: Any, l2_norm: bool) -> None:
    """k and scaled q as columns side by side, v as columns, and q . k in every partition."""
    own = slice(batch.base, batch.base + batch.count)
    k_rows, k_shape = batch.count * batch.k_heads, (batch.k_dim, batch.count, batch.k_heads)
    step.kq = nl.ndarray((*k_shape, 2), nl.float32)
    step.out = nl.ndarray((batch.v_dim, batch.count, batch.v_heads), nl.float32)
    keys = _as_columns(batch, key[own], k_rows, batch.k_dim, l2_norm)
    queries = _as_columns(batch, query[own], k_rows, batch.k_dim, l2_norm)
    nisa.tensor_copy(step.kq[:, :, :, 0], keys)
    nisa.tensor_scalar(step.kq[:, :, :, 1], queries, nl.multiply, batch.scale)
    values = _as_columns(batch, value[own], batch.count * batch.v_heads, batch.v_dim, False)
    step.value = nl.ndarray((batch.v_dim, batch.count, batch.v_heads), nl.float32)
    nisa.tensor_copy(step.value, values, engine=nisa.engine.scalar)
    product = nl.ndarray(k_shape, nl.float32)
    nisa.tensor_tensor(product, step.kq[:, :, :, 0], step.kq[:, :, :, 1], nl.multiply)
    ones = nl.ndarray((batch.k_dim, batch.v_dim), nl.float32)
    nisa.memset(ones, 1.0)
    overlap = nl.ndarray((batch.v_dim, k_rows), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(overlap, ones, product, is_stationary_onezero=True)
    step.overlap = nl.ndarray((batch.v_dim, batch.count, batch.v_heads), nl.float32)
    by_key_head = step.overlap.reshape((batch.v_dim, k_rows, batch.v_heads // batch.k_heads))
    spread = overlap.expand_dim(2).broadcast(2, batch.v_heads // batch.k_heads)
    nisa.tensor_copy(by_key_head, spread)


def load_gates(batch: Batch, step: Step, g: Any, beta: Any, a_log: Any, dt_bias: Any) -> None:
    """exp(g) and beta [128, sequences, heads], the same in every partition."""
    decay, strength = _spread(batch, g), _spread(batch, beta)
    if a_log is not None:
        rate, bias = _per_head(batch, a_log), _per_head(batch, dt_bias)
        nisa.activation(rate, nl.exp, rate)
        # exp(a_log) stays finite, so that its product with a softplus of 0 is 0 and no NaN.
        nisa.tensor_scalar(rate, rate, nl.minimum, MAX_FLOAT32, op1=nl.multiply, operand1=-1.0)
        everywhere = (PARTITIONS, batch.count, batch.v_heads)
        nisa.tensor_tensor(decay, decay, nl.broadcast_to(bias, everywhere), nl.add)
        nisa.activation(decay, nl.softplus, decay)
        nisa.tensor_tensor(decay, decay, nl.broadcast_to(rate, everywhere), nl.multiply)
        nisa.activation(strength, nl.sigmoid, strength)
    nisa.activation(decay, nl.exp, decay)
    step.decay, step.beta = decay, strength


def _spread(batch: Batch, source: Any) -> Any:
    """The group's [sequences, heads] of `source` in every partition."""
    tile = nl.ndarray((PARTITIONS, batch.count, batch.v_heads), nl.float32)
    own = source[batch.base : batch.base + batch.count]
    nisa.dma_copy(tile, own.ap([[0, PARTITIONS], [batch.v_heads, batch.count], [1, batch.v_heads]]))
    return tile


def _per_head(batch: Batch, source: Any) -> Any:
    tile = nl.ndarray((PARTITIONS, 1, batch.v_heads), nl.float32)
    nisa.dma_copy(tile, source.ap([[0, PARTITIONS], [1, 1], [1, batch.v_heads]]))
    return tile


def finish_outputs(batch: Batch, step: Step, gate: Any, norm_weight: Any, out: Any) -> None:
    """Turns the outputs back to rows, norms and gates them, and stores them."""
    rows = batch.count * batch.v_heads
    turned = nl.ndarray((rows, batch.v_dim), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(turned, step.out)
    own = slice(batch.base, batch.base + batch.count)
    result = nl.ndarray((rows, batch.v_dim), out.dtype)
    if gate is None:
        nisa.tensor_copy(result, turned)
    else:
        weighted = nl.ndarray((rows, batch.v_dim), nl.float32)
        nisa.dma_copy(weighted, gate[own].reshape((rows, batch.v_dim)))
        nisa.activation(weighted, nl.silu, weighted)
        weight = nl.ndarray((rows, batch.v_dim), nl.float32)
        nisa.dma_copy(weight, norm_weight.ap([[0, rows], [1, batch.v_dim]]))
        nisa.tensor_tensor(weighted, weighted, weight, nl.multiply)
        squares, rms = nl.ndarray((rows, batch.v_dim), nl.float32), nl.ndarray((rows, 1), nl.float32)
        nisa.activation_reduce(squares, nl.square, turned, nl.add, rms)
        nisa.activation(rms, nl.rsqrt, rms, scale=1.0 / batch.v_dim, bias=batch.eps)
        nisa.scalar_tensor_tensor(result, turned, nl.multiply, rms, nl.multiply, weighted)
    nisa.dma_copy(out[own].reshape((rows, batch.v_dim)), result)
