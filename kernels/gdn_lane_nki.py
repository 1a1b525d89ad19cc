"""Owns what a lane (one head of one sequence) of the GDN prefill keeps: constants, running state, gates of a group.

"Columns" are [128 tokens, chunks of the group] float32.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from warmstate.kernels.gdn_constants import CHUNK, MERGED_BY_MASK

MAX_FLOAT32 = 3.0e38
LEAST_LOG_DECAY = -25.0
"""A stronger decay counts as this one (1e-11), so that differences of cumulative decays keep their digits."""


class Constants:
    """Tiles that every chunk reads."""

    eye: Any
    eye_operand: Any
    mask_eye: Any
    block_mask: Any
    mask_later: Any
    mask_earlier: Any
    pair_masks: list[Any]
    norm_weight: Any


class Head:
    """One lane: which heads, and the running state in float32 and as a matmul operand."""

    def __init__(
        self, sequence: int, v_head: int, k_head: int, length: int, k_dim: int, v_dim: int, scale: float, eps: float
    ) -> None:
        self.sequence, self.v_head, self.k_head, self.length = sequence, v_head, k_head, length
        self.k_dim, self.v_dim, self.scale, self.eps = k_dim, v_dim, scale, eps
        self.state: Any = None
        self.operand: Any = None

    def start(self, state: Any, dtype: Any) -> None:
        """Takes `state` [dk, dv] float32."""
        self.state = self.operand = state
        if dtype != nl.float32:
            self.operand = nl.ndarray((self.k_dim, self.v_dim), dtype)
            nisa.tensor_copy(self.operand, state, engine=nisa.engine.scalar)

    def step(self, decay: Any, written: Any, dtype: Any) -> None:
        """state = decay * state + written; the operand first, since the next chunk waits for it."""
        before = self.state
        self.state = nl.ndarray((self.k_dim, self.v_dim), nl.float32)
        self.operand = self.state
        if dtype != nl.float32:
            self.operand = nl.ndarray((self.k_dim, self.v_dim), dtype)
            nisa.scalar_tensor_tensor(self.operand, before, nl.multiply, decay, nl.add, written)
        nisa.scalar_tensor_tensor(self.state, before, nl.multiply, decay, nl.add, written)


class Columns:
    """The gates of a group, per token on the partitions; `gate_last` [128, group] is the same in every partition."""

    rows: Any
    log_gate: Any
    neg_log_gate: Any
    neg_beta: Any
    beta: Any
    neg_beta_gate: Any
    scaled_gate: Any
    gate_last: Any


def load_constants(planes: Any, pair_masks: Any, dtype: Any, norm_weight: Any, v_dim: int) -> Constants:
    """Loads each constant once; the masks are added on the tensor engine, in bfloat16."""
    constants = Constants()
    constants.eye = nl.load(planes[0])
    constants.eye_operand = constants.eye if dtype == nl.float32 else nl.load(planes[0], dtype=dtype)
    constants.mask_eye = constants.eye_operand if dtype == nl.bfloat16 else nl.load(planes[0], dtype=nl.bfloat16)
    constants.block_mask = nl.load(planes[1])
    constants.mask_later = nl.load(planes[2], dtype=nl.bfloat16)
    constants.mask_earlier = nl.load(planes[3], dtype=nl.bfloat16)
    constants.pair_masks = [nl.load(pair_masks[i]) for i in range(len(MERGED_BY_MASK))]
    constants.norm_weight = None
    if norm_weight is not None:
        constants.norm_weight = nl.ndarray((CHUNK, v_dim), nl.float32)
        nisa.dma_copy(constants.norm_weight, norm_weight.ap([[0, CHUNK], [1, v_dim]]))
    return constants


def gates(
    head: Head, constants: Constants, g: Any, beta: Any, base: int, size: int, valid_len: Any, a_log: Any, dt_bias: Any
) -> Columns:
    """Loads g and beta of `size` chunks as rows, prepares them there, and turns them into columns."""
    g_rows, beta_rows = _load_rows(head, g, base, size), _load_rows(head, beta, base, size)
    if a_log is not None:
        _raw_gates(head, g_rows, beta_rows, a_log, dt_bias, size)
        _clear_tail(head, g_rows, beta_rows, base, size)
    if valid_len is not None:
        g_rows, beta_rows = _clear_invalid(head, g_rows, beta_rows, base, size, valid_len)
    columns = Columns()
    columns.rows = nl.ndarray((size, CHUNK), nl.float32)
    nisa.tensor_scalar_cumulative(columns.rows, g_rows, op0=nl.maximum, op1=nl.add, imm0=LEAST_LOG_DECAY)
    turned = nl.ndarray((CHUNK, 3, size), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(turned[:, 0], columns.rows)
    nisa.nc_transpose(turned[:, 1], beta_rows)
    last = columns.rows[:, CHUNK - 1 : CHUNK].broadcast(1, CHUNK)
    nisa.nc_matmul(turned[:, 2], last, constants.eye[0:size, 0:size], is_moving_onezero=True)
    columns.log_gate = nl.ndarray((CHUNK, size), nl.float32)
    columns.beta = nl.ndarray((CHUNK, size), nl.float32)
    nisa.tensor_copy(columns.log_gate, turned[:, 0], engine=nisa.engine.vector)
    nisa.tensor_copy(columns.beta, turned[:, 1], engine=nisa.engine.vector)
    gate = nl.ndarray((CHUNK, 2, size), nl.float32)
    nisa.activation(gate, nl.exp, turned[:, 0:3:2])
    columns.gate_last = gate[:, 1]
    columns.neg_log_gate = nl.ndarray((CHUNK, size), nl.float32)
    columns.neg_beta = nl.ndarray((CHUNK, size), nl.float32)
    columns.neg_beta_gate = nl.ndarray((CHUNK, size), nl.float32)
    columns.scaled_gate = nl.ndarray((CHUNK, size), nl.float32)
    nisa.tensor_scalar(columns.neg_log_gate, columns.log_gate, nl.multiply, -1.0)
    nisa.tensor_scalar(columns.neg_beta, columns.beta, nl.multiply, -1.0)
    nisa.tensor_tensor(columns.neg_beta_gate, columns.neg_beta, gate[:, 0], nl.multiply)
    nisa.tensor_scalar(columns.scaled_gate, gate[:, 0], nl.multiply, head.scale)
    return columns


def _load_rows(head: Head, source: Any, base: int, size: int) -> Any:
    """[size, 128] float32 of one head, zeros after the last token."""
    rows = nl.ndarray((size, CHUNK), nl.float32)
    first = base * CHUNK
    full, tail = divmod(min(head.length - first, size * CHUNK), CHUNK)
    if tail:
        nisa.memset(rows, 0.0)
    tokens = source[head.sequence, head.v_head]
    if full:
        nisa.dma_copy(rows[0:full], tokens[first : first + full * CHUNK].reshape((full, CHUNK)))
    if tail:
        nisa.dma_copy(rows[full : full + 1, 0:tail], tokens[head.length - tail : head.length])
    return rows


def _raw_gates(head: Head, g_rows: Any, beta_rows: Any, a_log: Any, dt_bias: Any, size: int) -> None:
    """g = -exp(a_log) softplus(g + dt_bias), beta = sigmoid(beta); exp(a_log) stays finite: 0 * inf would be NaN."""
    rate, bias = nl.ndarray((size, 1), nl.float32), nl.ndarray((size, 1), nl.float32)
    nisa.dma_copy(rate, a_log.ap([[0, size], [1, 1]], offset=head.v_head))
    nisa.dma_copy(bias, dt_bias.ap([[0, size], [1, 1]], offset=head.v_head))
    nisa.activation(rate, nl.exp, rate)
    nisa.tensor_scalar(rate, rate, nl.minimum, MAX_FLOAT32, op1=nl.multiply, operand1=-1.0)
    nisa.activation(g_rows, nl.softplus, g_rows, bias=bias)
    nisa.tensor_scalar(g_rows, g_rows, nl.multiply, rate)
    nisa.activation(beta_rows, nl.sigmoid, beta_rows)


def _clear_tail(head: Head, g_rows: Any, beta_rows: Any, base: int, size: int) -> None:
    """Sets the gates after the last token to 0."""
    num_tokens = head.length - base * CHUNK
    if num_tokens >= size * CHUNK:
        return
    for rows in (g_rows, beta_rows):
        nisa.affine_select(rows, [[-1, CHUNK]], -CHUNK, rows, 0.0, cmp_op=nl.greater_equal, offset=num_tokens - 1)


def _clear_invalid(head: Head, g_rows: Any, beta_rows: Any, base: int, size: int, valid_len: Any) -> tuple[Any, Any]:
    """The gates with 0 from token valid_len on, whatever was there."""
    length_int = nl.ndarray((size, 1), nl.int32)
    nisa.dma_copy(length_int, valid_len.ap([[0, size], [1, 1]], offset=head.sequence))
    limit = nl.ndarray((size, 1), nl.float32)
    nisa.tensor_copy(limit, length_int)
    positions = nl.ndarray((size, CHUNK), nl.float32)
    nisa.iota(positions, [[1, CHUNK]], offset=base * CHUNK, channel_multiplier=CHUNK)
    valid = nl.ndarray((size, CHUNK), nl.uint8)
    nisa.tensor_scalar(valid, positions, nl.less, limit)
    cleared = []
    for rows in (g_rows, beta_rows):
        kept = nl.ndarray((size, CHUNK), nl.float32)
        nisa.select_reduce(kept, valid, rows, 0.0)
        cleared.append(kept)
    return cleared[0], cleared[1]
