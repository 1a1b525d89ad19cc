"""Owns the steps of the GDN prefill on one chunk of 128 tokens; `gdn_prefill_nki` puts them in order.

A tile named x_t holds x with tokens on the free axis.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from warmstate.kernels.gdn_constants import CHUNK, MERGED_BY_MASK
from warmstate.kernels.gdn_lane_nki import Columns, Constants, Head

HALF = CHUNK // 2
NUM_BASE_PHASES = 4
PHASES_PER_MERGE = 3
NUM_INVERT_PHASES = NUM_BASE_PHASES + PHASES_PER_MERGE * len(MERGED_BY_MASK) + 2


class Chunk:
    """The tiles of one chunk between its steps."""

    index: int
    num_tokens: int
    kq_t: Any
    key: Any
    value: Any
    neg_a: Any
    w_t: Any
    key_out: Any
    value_in: Any
    neg_beta_gate: Any
    scaled_gate: Any
    gate_last: Any
    small: Any
    small_t: Any
    square: Any
    inverse: Any
    inverse_t: Any
    middle: Any
    merged: list[Any]
    corner: Any


def load_chunk(head: Head, query: Any, key: Any, value: Any, index: int, l2_norm: bool, constants: Constants) -> Chunk:
    """Loads q, k (both ways round) and v of one chunk, zeros after the last token."""
    chunk = Chunk()
    chunk.index = index
    first = index * CHUNK
    count = chunk.num_tokens = min(CHUNK, head.length - first)
    dtype = query.dtype
    chunk.kq_t = nl.ndarray((head.k_dim, 2, CHUNK), dtype)
    chunk.key = nl.ndarray((CHUNK, head.k_dim), dtype)
    chunk.value = nl.ndarray((CHUNK, head.v_dim), dtype)
    tokens = slice(first, first + count)
    sources = (key[head.sequence, head.k_head, tokens], query[head.sequence, head.k_head, tokens])
    if count < CHUNK:
        nisa.memset(chunk.key, 0.0)
        nisa.memset(chunk.value, 0.0)
        nisa.memset(chunk.kq_t, 0.0)
    nisa.dma_copy(chunk.key[0:count], sources[0])
    nisa.dma_copy(chunk.value[0:count], value[head.sequence, head.v_head, tokens])
    if not l2_norm:
        for i in range(2):
            nisa.dma_transpose(chunk.kq_t[:, i, 0:count], sources[i])
        return chunk
    plain_query = nl.ndarray((CHUNK, head.k_dim), dtype)
    if count < CHUNK:
        nisa.memset(plain_query, 0.0)
    nisa.dma_copy(plain_query[0:count], sources[1])
    for i, tile in enumerate((chunk.key, plain_query)):
        _l2_normalise(head, tile)
        turned = nl.ndarray((head.k_dim, CHUNK), dtype, buffer=nl.psum)
        nisa.nc_transpose(turned, tile)
        nisa.tensor_copy(chunk.kq_t[:, i], turned, engine=nisa.engine.scalar)
    return chunk


def _l2_normalise(head: Head, tile: Any) -> None:
    """Rows of `tile` [128, dk] by their length, in place."""
    squares = nl.ndarray((CHUNK, head.k_dim), nl.float32)
    total = nl.ndarray((CHUNK, 1), nl.float32)
    nisa.activation_reduce(squares, nl.square, tile, nl.add, total)
    nisa.activation(total, nl.rsqrt, total, bias=head.eps)
    nisa.tensor_scalar(tile, tile, nl.multiply, total)


def interaction(head: Head, constants: Constants, columns: Columns, chunk: Chunk, member: int) -> None:
    """-A, W^T and the operands of the recurrence that do not depend on the state."""
    dtype = chunk.key.dtype
    own = slice(member, member + 1)
    select = constants.eye[0 : columns.rows.shape[0], own].broadcast(1, CHUNK)
    decays = []
    for mask, sign, bias in (
        (constants.mask_later, -1.0, columns.log_gate),
        (constants.mask_earlier, 1.0, columns.neg_log_gate),
    ):
        spread = nl.ndarray((CHUNK, CHUNK), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(spread, select, columns.rows, is_stationary_onezero=True, accumulate=False)
        nisa.nc_matmul(spread, constants.mask_eye, mask, accumulate=True)
        decay = nl.ndarray((CHUNK, CHUNK), nl.float32)
        nisa.activation(decay, nl.exp, spread, bias=bias[:, own], scale=sign)
        decays.append(decay)
    products = nl.ndarray((CHUNK, 2, CHUNK), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(products, chunk.kq_t[:, 0], chunk.kq_t)
    chunk.neg_a = nl.ndarray((CHUNK, CHUNK), nl.float32)
    nisa.scalar_tensor_tensor(
        chunk.neg_a, products[:, 0], nl.multiply, columns.neg_beta[:, own], nl.multiply, decays[0]
    )
    chunk.w_t = nl.ndarray((CHUNK, CHUNK), dtype)
    nisa.scalar_tensor_tensor(chunk.w_t, products[:, 1], nl.multiply, head.scale, nl.multiply, decays[1])
    chunk.key_out = nl.ndarray((CHUNK, head.k_dim), dtype)
    nisa.tensor_scalar(chunk.key_out, chunk.key, nl.multiply, decays[1][:, CHUNK - 1 : CHUNK])
    chunk.value_in = nl.ndarray((CHUNK, head.v_dim), dtype)
    nisa.tensor_scalar(chunk.value_in, chunk.value, nl.multiply, columns.beta[:, own])
    chunk.neg_beta_gate, chunk.scaled_gate = columns.neg_beta_gate[:, own], columns.scaled_gate[:, own]
    chunk.gate_last = columns.gate_last[0 : head.k_dim, own]


def invert(phase: int, constants: Constants, chunk: Chunk) -> None:
    """One phase of X^T = (I + A)^-T; each phase is one step on each engine, so that chunks fill each other's waits."""
    if phase < NUM_BASE_PHASES:
        _invert_base(phase, constants, chunk)
    elif phase < NUM_INVERT_PHASES - 2:
        level, step = divmod(phase - NUM_BASE_PHASES, PHASES_PER_MERGE)
        _merge(step, MERGED_BY_MASK[level], constants.pair_masks[level], chunk)
    else:
        _merge_halves(phase - (NUM_INVERT_PHASES - 2), chunk)


def _invert_base(step: int, constants: Constants, chunk: Chunk) -> None:
    """Blocks of 4: with N = -A there, X = (I + N)(I + N^2); `small_t` is (I + N)^T."""
    if step == 0:
        chunk.small = nl.ndarray((CHUNK, CHUNK), nl.float32)
        nisa.tensor_tensor(chunk.small, chunk.neg_a, constants.block_mask, nl.multiply)
        return
    product = nl.ndarray((CHUNK, CHUNK), nl.float32, buffer=nl.psum)
    result = nl.ndarray((CHUNK, CHUNK), nl.float32)
    if step == 1:
        nisa.nc_transpose(product, chunk.small)
        nisa.tensor_tensor(result, product, constants.eye, nl.add)
        chunk.small_t = result
    elif step == 2:
        nisa.nc_matmul(product, chunk.small_t, chunk.small)
        nisa.tensor_tensor(result, product, chunk.small, nl.subtract)
        chunk.square = result
    else:
        nisa.nc_matmul(product, chunk.square, chunk.small_t)
        nisa.tensor_tensor(result, product, chunk.small_t, nl.add)
        chunk.inverse_t = result


def _merge(step: int, block: int, mask: Any, chunk: Chunk) -> None:
    """Pairs of blocks: the corner -Q^-1 R P^-1, transposed, into the columns of second blocks of X^T."""
    seconds = chunk.inverse_t.reshape((CHUNK, HALF // block, 2, block))[:, :, 1]
    if step == 0:
        turned = nl.ndarray((CHUNK, CHUNK), nl.float32, buffer=nl.psum)
        nisa.nc_transpose(turned, chunk.inverse_t)
        chunk.inverse = nl.ndarray((CHUNK, CHUNK), nl.float32)
        nisa.tensor_copy(chunk.inverse, turned, engine=nisa.engine.scalar)
        middle = nl.ndarray((CHUNK, HALF), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(middle, chunk.neg_a, seconds)
        chunk.middle = nl.ndarray((CHUNK, HALF), nl.float32)
        nisa.tensor_copy(chunk.middle, middle, engine=nisa.engine.scalar)
    elif step == 1:
        chunk.corner = nl.ndarray((CHUNK, HALF), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(chunk.corner, chunk.inverse, chunk.middle)
    else:
        nisa.tensor_copy_predicated(seconds, chunk.corner, mask)


def _merge_halves(step: int, chunk: Chunk) -> None:
    """The last pair, blocks of 64, needs no mask: its corner is a whole tile."""
    if step == 0:
        turned = nl.ndarray((HALF, HALF), nl.float32, buffer=nl.psum)
        nisa.nc_transpose(turned, chunk.inverse_t[0:HALF, 0:HALF])
        chunk.inverse = nl.ndarray((HALF, HALF), nl.float32)
        nisa.tensor_copy(chunk.inverse, turned, engine=nisa.engine.scalar)
        middle = nl.ndarray((HALF, HALF), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(middle, chunk.neg_a[HALF:CHUNK, 0:HALF], chunk.inverse_t[HALF:CHUNK, HALF:CHUNK])
        chunk.middle = nl.ndarray((HALF, HALF), nl.float32)
        nisa.tensor_copy(chunk.middle, middle, engine=nisa.engine.scalar)
    else:
        chunk.corner = nl.ndarray((HALF, HALF), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(chunk.corner, chunk.inverse, chunk.middle)


def close_inverse(chunk: Chunk, dtype: Any) -> None:
    """Sets the last corner of X^T; where bfloat16 applies it, X^T becomes the sum of two such tiles.

    One rounding of X to bfloat16 would cost more than all others together: 4e-2 of the output for near-parallel keys.
    """
    nisa.tensor_copy(chunk.inverse_t[0:HALF, HALF:CHUNK], chunk.corner, engine=nisa.engine.scalar)
    if dtype == nl.float32:
        chunk.merged = [chunk.inverse_t]
        return
    high, low = nl.ndarray((CHUNK, CHUNK), dtype), nl.ndarray((CHUNK, CHUNK), dtype)
    nisa.tensor_copy(high, chunk.inverse_t, engine=nisa.engine.scalar)
    nisa.tensor_tensor(low, chunk.inverse_t, high, nl.subtract)
    chunk.merged = [high, low]


def recur(head: Head, constants: Constants, chunk: Chunk, gate: Any, out: Any) -> None:
    """delta, the outputs and the next state of one chunk."""
    dtype = chunk.key.dtype
    shape = (CHUNK, head.v_dim)
    read = nl.ndarray(shape, nl.float32, buffer=nl.psum)
    nisa.nc_matmul(read, chunk.kq_t[:, 0], head.operand)
    missing = nl.ndarray(shape, dtype)
    nisa.scalar_tensor_tensor(missing, read, nl.multiply, chunk.neg_beta_gate, nl.add, chunk.value_in)
    solved = nl.ndarray(shape, nl.float32, buffer=nl.psum)
    for i, part in enumerate(chunk.merged):
        nisa.nc_matmul(solved, part, missing, accumulate=i > 0)
    delta = nl.ndarray(shape, dtype)
    nisa.tensor_copy(delta, solved, engine=nisa.engine.scalar)
    written = nl.ndarray((head.k_dim, head.v_dim), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(written, chunk.key_out, delta)
    queried = nl.ndarray(shape, nl.float32, buffer=nl.psum)
    nisa.nc_matmul(queried, chunk.kq_t[:, 1], head.operand)
    head.step(chunk.gate_last, written, dtype)
    carried = nl.ndarray(shape, dtype)
    nisa.activation(carried, nl.copy, queried, scale=chunk.scaled_gate)
    total = nl.ndarray(shape, nl.float32, buffer=nl.psum)
    nisa.nc_matmul(total, chunk.w_t, delta, accumulate=False)
    nisa.nc_matmul(total, constants.eye_operand, carried, accumulate=True)
    result = nl.ndarray(shape, dtype)
    if gate is None:
        nisa.tensor_copy(result, total, engine=nisa.engine.scalar)
    else:
        _gated_norm(head, constants, chunk, gate, total, result)
    first = chunk.index * CHUNK
    nisa.dma_copy(out[head.sequence, head.v_head, first : first + chunk.num_tokens], result[0 : chunk.num_tokens])


def _gated_norm(head: Head, constants: Constants, chunk: Chunk, gate: Any, total: Any, result: Any) -> None:
    """result = total / rms(total) * norm_weight * silu(gate), by token."""
    shape, first = (CHUNK, head.v_dim), chunk.index * CHUNK
    z = nl.ndarray(shape, gate.dtype)
    if chunk.num_tokens < CHUNK:
        nisa.memset(z, 0.0)
    nisa.dma_copy(z[0 : chunk.num_tokens], gate[head.sequence, head.v_head, first : first + chunk.num_tokens])
    weighted = nl.ndarray(shape, nl.float32)
    nisa.activation(weighted, nl.silu, z)
    nisa.tensor_tensor(weighted, weighted, constants.norm_weight, nl.multiply)
    squares, rms = nl.ndarray(shape, nl.float32), nl.ndarray((CHUNK, 1), nl.float32)
    nisa.activation_reduce(squares, nl.square, total, nl.add, rms)
    nisa.activation(rms, nl.rsqrt, rms, scale=1.0 / head.v_dim, bias=head.eps)
    nisa.scalar_tensor_tensor(result, total, nl.multiply, rms, nl.multiply, weighted)
