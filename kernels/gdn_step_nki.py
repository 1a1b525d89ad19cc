"""Owns the steps of the GDN decode on one batch of (sequence, value head) pairs; `gdn_decode_nki` puts them in order.

Vectors are columns: [128, sequences, heads] tiles with the vector on the partitions.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128
MAX_FLOAT32 = 3.0e38


class Constants:
    """What all batches share: the slot of each sequence, and what the options need, in every partition."""

    slots: Any
    eye: Any
    ones: Any
    rate: Any = None
    bias: Any = None
    norm_weight: Any = None


class Step:
    """One token of a batch: first the tiles as they were loaded, then what the state is asked and what comes of it."""

    query: Any
    key: Any
    value: Any
    decay: Any
    beta: Any
    gate: Any = None
    keys: Any
    asking: Any
    answers: Any
    overlap: Any
    delta: Any


class Part:
    """Some heads of one sequence, whose state [dk, heads, dv] float32 moves in one transfer."""

    def __init__(self, sequence: int, heads: slice) -> None:
        """`sequence` counts within the batch."""
        self.sequence, self.heads = sequence, heads
        self.state: Any = None


class Batch:
    """A run of sequences: `first` within the program's own, `base` within the launch's."""

    def __init__(
        self, first: int, base: int, count: int, heads: tuple[int, int], dims: tuple[int, int], heads_at_once: int
    ) -> None:
        """`heads` are the key and value heads, `dims` dk and dv."""
        self.first, self.base, self.count, self.rows = first, base, count, slice(base, base + count)
        self.k_heads, self.v_heads = heads
        self.k_dim, self.v_dim = dims
        self.ratio = self.v_heads // self.k_heads
        starts = range(0, self.v_heads, heads_at_once)
        self.parts = [
            Part(i, slice(start, min(start + heads_at_once, self.v_heads))) for i in range(count) for start in starts
        ]


def load_constants(slots: Any, eye: Any, a_log: Any, dt_bias: Any, norm_weight: Any, max_rows: int) -> Constants:
    """The slots first: the states wait for them."""
    constants = Constants()
    constants.slots = nl.ndarray((1, slots.shape[0]), nl.int32)
    nisa.dma_copy(constants.slots, slots)
    constants.eye = nl.load(eye)
    constants.ones = nl.ndarray((PARTITIONS, PARTITIONS), nl.float32)
    nisa.memset(constants.ones, 1.0, engine=nisa.engine.vector)
    if norm_weight is not None:
        constants.norm_weight = _in_rows(norm_weight, max_rows)
    if a_log is not None:
        constants.rate, constants.bias = _in_rows(a_log, PARTITIONS), _in_rows(dt_bias, PARTITIONS)
        nisa.activation(constants.rate, nl.exp, constants.rate)
        # exp(a_log) stays finite, so that its product with a softplus of 0 is 0 and no NaN.
        nisa.tensor_scalar(constants.rate, constants.rate, nl.minimum, MAX_FLOAT32, op1=nl.multiply, operand1=-1.0)
    return constants


def _in_rows(source: Any, rows: int) -> Any:
    """[rows, n] float32: `source` [n] in every row."""
    tile = nl.ndarray((rows, source.shape[0]), nl.float32)
    nisa.dma_copy(tile, source.ap([[0, rows], [1, source.shape[0]]]))
    return tile


def load_step(batch: Batch, query: Any, key: Any, value: Any, g: Any, beta: Any, gate: Any) -> Step:
    """Begins the transfers of one token: vectors as rows of their own dtype, g and beta in every partition."""
    step = Step()
    step.key, step.query, step.value = (_load_rows(source[batch.rows]) for source in (key, query, value))
    step.decay, step.beta = _load_everywhere(batch, g), _load_everywhere(batch, beta)
    if gate is not None:
        step.gate = _load_rows(gate[batch.rows])
    return step


def _load_rows(source: Any) -> Any:
    """[sequences * heads, width] of `source` [sequences, heads, width]."""
    count, heads, width = source.shape
    return nl.load(source.reshape((count * heads, width)))


def _load_everywhere(batch: Batch, source: Any) -> Any:
    tile = nl.ndarray((PARTITIONS, batch.count, batch.v_heads), nl.float32)
    pattern = [[0, PARTITIONS], [batch.v_heads, batch.count], [1, batch.v_heads]]
    nisa.dma_copy(tile, source[batch.rows].ap(pattern))
    return tile


def load_states(batch: Batch, constants: Constants, states: Any) -> None:
    """Begins the gathering of the states by slot; zeros where the slot is out of range."""
    for part in batch.parts:
        heads = part.heads.stop - part.heads.start
        part.state = nl.ndarray((batch.k_dim, heads, batch.v_dim), nl.float32)
        nisa.memset(part.state, 0.0)
        nisa.dma_copy(part.state, _slot(batch, constants, states, part), oob_mode=nisa.oob_mode.skip)


def store_state(batch: Batch, constants: Constants, states: Any, part: Part) -> None:
    """Scatters the state of a part back; nowhere where the slot is out of range."""
    nisa.dma_copy(_slot(batch, constants, states, part), part.state, oob_mode=nisa.oob_mode.skip)


def _slot(batch: Batch, constants: Constants, states: Any, part: Part) -> Any:
    """[dk, heads, dv] of a part's slot, at a run-time address."""
    row, heads = batch.v_heads * batch.v_dim, part.heads.stop - part.heads.start
    pattern = [[row, batch.k_dim], [batch.v_dim, heads], [1, batch.v_dim]]
    at = batch.first + part.sequence
    offset = part.heads.start * batch.v_dim
    return states.ap(pattern, offset=offset, scalar_offset=constants.slots[:, at : at + 1], indirect_dim=0)


def prepare(batch: Batch, constants: Constants, step: Step, scale: float, l2_norm: bool, eps: float) -> None:
    """All that needs no state: what each state is asked, -beta exp(g) k and scale exp(g) q, beta v, scale (q . k)."""
    _prepare_gates(batch, constants, step)
    heads, k_rows = (batch.k_dim, batch.count * batch.k_heads, batch.ratio), batch.count * batch.k_heads
    keys, queries = (_as_columns(_normalised(x, eps) if l2_norm else x) for x in (step.key, step.query))
    step.keys = nl.ndarray((batch.k_dim, k_rows), nl.float32)
    nisa.tensor_copy(step.keys, keys)
    step.asking = nl.ndarray((*heads, 2), nl.float32)
    decay, beta = (tile[0 : batch.k_dim].reshape(heads) for tile in (step.decay, step.beta))
    strength = nl.ndarray(heads, nl.float32)
    nisa.scalar_tensor_tensor(strength, decay, nl.multiply, -1.0, nl.multiply, beta)
    key, query = (columns.expand_dim(2).broadcast(2, batch.ratio) for columns in (step.keys, queries))
    nisa.tensor_tensor(step.asking[:, :, :, 0], key, strength, nl.multiply)
    nisa.scalar_tensor_tensor(step.asking[:, :, :, 1], query, nl.multiply, scale, nl.multiply, decay)
    product = nl.ndarray((batch.k_dim, k_rows), nl.float32)
    nisa.scalar_tensor_tensor(product, queries, nl.multiply, scale, nl.multiply, step.keys)
    step.overlap = nl.ndarray((batch.v_dim, k_rows), nl.float32, buffer=nl.psum)
    ones = constants.ones[0 : batch.k_dim, 0 : batch.v_dim]
    nisa.nc_matmul(step.overlap, ones, product, is_stationary_onezero=True)
    values = _as_columns(step.value)
    pairs = (batch.v_dim, batch.count, batch.v_heads)
    step.value = nl.ndarray(pairs, nl.float32)
    nisa.tensor_tensor(step.value, values.reshape(pairs), step.beta[0 : batch.v_dim], nl.multiply)
    step.delta = nl.ndarray(pairs, nl.float32)
    step.answers = nl.ndarray((*pairs, 2), nl.float32, buffer=nl.psum)


def _prepare_gates(batch: Batch, constants: Constants, step: Step) -> None:
    """exp(g), and with raw projections g = -exp(a_log) softplus(g + dt_bias), beta = sigmoid(beta)."""
    if constants.rate is not None:
        shape = (PARTITIONS, batch.count, batch.v_heads)
        rate, bias = (nl.broadcast_to(tile.expand_dim(1), shape) for tile in (constants.rate, constants.bias))
        nisa.tensor_tensor(step.decay, step.decay, bias, nl.add)
        nisa.activation(step.decay, nl.softplus, step.decay)
        nisa.tensor_tensor(step.decay, step.decay, rate, nl.multiply)
        nisa.activation(step.beta, nl.sigmoid, step.beta)
    nisa.activation(step.decay, nl.exp, step.decay)


def _normalised(rows: Any, eps: float) -> Any:
    result, total = nl.ndarray(rows.shape, nl.float32), nl.ndarray((rows.shape[0], 1), nl.float32)
    nisa.activation_reduce(result, nl.square, rows, nl.add, total)
    nisa.activation(total, nl.rsqrt, total, bias=eps)
    nisa.tensor_scalar(result, rows, nl.multiply, total)
    return result


def _as_columns(rows: Any) -> Any:
    """PSUM [width, rows] of `rows` [rows, width]."""
    turned = nl.ndarray((rows.shape[1], rows.shape[0]), rows.dtype, buffer=nl.psum)
    nisa.nc_transpose(turned, rows)
    return turned


def solve(batch: Batch, step: Step, part: Part) -> None:
    """delta = beta v - beta exp(g) k S, the one instruction between the answers of a state and its update."""
    answers = step.answers[:, part.sequence, part.heads]
    asking = step.asking.reshape((batch.k_dim, batch.count, batch.v_heads, 2))[:, part.sequence, part.heads]
    for head in range(part.heads.stop - part.heads.start):
        nisa.nc_matmul(answers[:, head], part.state[:, head], asking[:, head], accumulate=False)
    value = step.value[:, part.sequence, part.heads]
    nisa.tensor_tensor(step.delta[:, part.sequence, part.heads], answers[:, :, 0], value, nl.add)


def update(batch: Batch, constants: Constants, step: Step, part: Part) -> None:
    """S = exp(g) S + k^T delta; the identity spreads delta over the partitions.

    Every second head is summed on the scalar engine and GpSimd, since the vector engine has most to do.
    """
    kept, after = (nl.ndarray(part.state.shape, nl.float32) for _ in range(2))
    eye = constants.eye[0 : batch.v_dim, 0 : batch.v_dim]
    heads = range(part.heads.start, part.heads.stop)
    for i, head in enumerate(heads):
        decay = step.decay[0 : batch.k_dim, part.sequence, head : head + 1]
        nisa.activation(kept[:, i], nl.copy, part.state[:, i], scale=decay)
    for i, head in enumerate(heads):
        spread = nl.ndarray((batch.k_dim, batch.v_dim), nl.float32, buffer=nl.psum)
        row = step.delta[:, part.sequence, head : head + 1].broadcast(1, batch.k_dim)
        nisa.nc_matmul(spread, row, eye, is_moving_onezero=True)
        at = part.sequence * batch.k_heads + head // batch.ratio
        key = step.keys[:, at : at + 1]
        if head % 2 == 0:
            written = nl.ndarray((batch.k_dim, batch.v_dim), nl.float32)
            nisa.activation(written, nl.copy, spread, scale=key)
            nisa.tensor_tensor(after[:, i], written, kept[:, i], nl.add, engine=nisa.engine.gpsimd)
        else:
            nisa.scalar_tensor_tensor(after[:, i], spread, nl.multiply, key, nl.add, kept[:, i])
    part.state = after


def store_outputs(batch: Batch, constants: Constants, step: Step, eps: float, out: Any) -> None:
    """o = scale exp(g) q S + scale (q . k) delta, turned back to rows, normed and gated, and stored."""
    pairs = (batch.v_dim, batch.count * batch.k_heads, batch.ratio)
    columns = nl.ndarray(pairs, nl.float32)
    overlap = step.overlap.expand_dim(2).broadcast(2, batch.ratio)
    nisa.tensor_tensor(columns, overlap, step.delta.reshape(pairs), nl.multiply)
    nisa.tensor_tensor(columns, columns, step.answers.reshape((*pairs, 2))[:, :, :, 1], nl.add)
    rows = batch.count * batch.v_heads
    turned = _as_columns(columns.reshape((batch.v_dim, rows)))
    result = nl.ndarray((rows, batch.v_dim), out.dtype)
    if step.gate is None:
        nisa.tensor_copy(result, turned)
    else:
        weighted = nl.ndarray((rows, batch.v_dim), nl.float32)
        nisa.activation(weighted, nl.silu, step.gate)
        nisa.tensor_tensor(weighted, weighted, constants.norm_weight[0:rows], nl.multiply)
        squares, rms = nl.ndarray((rows, batch.v_dim), nl.float32), nl.ndarray((rows, 1), nl.float32)
        nisa.activation_reduce(squares, nl.square, turned, nl.add, rms)
        nisa.activation(rms, nl.rsqrt, rms, scale=1.0 / batch.v_dim, bias=eps)
        nisa.scalar_tensor_tensor(result, turned, nl.multiply, rms, nl.multiply, weighted)
    nisa.dma_copy(out[batch.rows].reshape((rows, batch.v_dim)), result)
