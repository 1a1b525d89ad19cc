"""Owns the prefill of the gated delta rule on trn2: chunks of 128 tokens, with states written out at chunk boundaries.

Written for NKI 0.7, which traces kernels as Python; the instructions have the signatures of 0.6. Simulated only
(`nki_sim`); never run on a device. The truth is `gated_delta_torch.recurrence`.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from warmstate.kernels.gdn_chunk_nki import (
    NUM_INVERT_PHASES,
    Chunk,
    close_inverse,
    interaction,
    invert,
    load_chunk,
    recur,
)
from warmstate.kernels.gdn_constants import CHUNK
from warmstate.kernels.gdn_lane_nki import Constants, Head, gates, load_constants

GROUP_CHUNKS = 8
"""Chunks solved together: enough independent work to cover the latency of each instruction."""


@nki.jit
def gdn_prefill(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    planes: Any,
    pair_masks: Any,
    initial_state: Any = None,
    valid_len: Any = None,
    a_log: Any = None,
    dt_bias: Any = None,
    gate: Any = None,
    norm_weight: Any = None,
    scale: float = 1.0,
    checkpoint_chunks: int = 0,
    l2_norm: bool = False,
    eps: float = 1e-6,
    group_chunks: int = GROUP_CHUNKS,
) -> Any:
    """o_t = S_t^T q_t of the gated delta rule, for S tokens of B x Hv independent heads ("lanes").

    Dimensions: B sequences, Hk key heads, Hv value heads (a multiple of Hk), S tokens (any number), dk, dv <= 128,
    C = ceil(S / 128) chunks, N = S // (128 * checkpoint_chunks) checkpoints.

    Arguments, all in HBM:
        query, key [B, Hk, S, dk], value [B, Hv, S, dv]: float32 or bfloat16; the dtype of query computes.
        g, beta [B, Hv, S] float32: log decay (<= 0, at least -25 counts) and write strength. With `a_log` and `dt_bias`
            [Hv] float32 they are the raw projections: g = -exp(a_log) softplus(g + dt_bias), beta = sigmoid(beta).
        planes [4, 128, 128] float32, pair_masks [4, 128, 64] uint8: `gdn_constants.planes()` and `.pair_masks()`.
        initial_state [B, dk, Hv, dv] float32: the state before the first token; zero if None.
        valid_len [B, 1] int32: tokens from there on change no state; their inputs must be finite. All S if None.
        gate [B, Hv, S, dv], norm_weight [dv] float32: o = rms_norm(o) * norm_weight * silu(gate), if given.
        scale: factor of q. checkpoint_chunks: a state is written every so many chunks; none if 0.
        l2_norm: q and k are normalised here, x / sqrt(sum x^2 + eps); else they come normalised.

    Returns out [B, Hv, S, dv] of query's dtype, the final state [B, dk, Hv, dv] float32, and, where N > 0, checkpoints
    [B, N, dk, Hv, dv] float32: the states after 128 * checkpoint_chunks * (n + 1) tokens.

    Pseudocode, per lane and chunk, with G = exp(cumsum(g)), L = strictly lower:
        A = beta * (k k^T) * (G_r / G_s) on L;  X = (I + A)^-1;  W = scale * (q k^T) * (G_r / G_s) on L and the diagonal
        delta = X (beta * v - beta * G * (k S))
        o = scale * G * (q S) + W delta;  S = G_last S + (k * G_last / G)^T delta

    X is made of 4 x 4 blocks, exactly (I + N)(I + N^2), and then merged: 4, 8, ... 64, each pair [[P, 0], [R, Q]] to
    [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]: float32, no powers of A, so nothing depends on A being small. Exponents are
    differences that are masked before exp, so nothing overflows. While a group of chunks is solved, the recurrence of
    the group before runs between its phases. Lanes are shared out over the programs (LNC2).

    Maths: https://arxiv.org/abs/2412.06464; the chunked form as in HF `torch_chunk_gated_delta_rule`.
    """
    num_sequences, k_heads, length, k_dim = query.shape
    v_heads, v_dim = value.shape[1], value.shape[3]
    assert v_heads % k_heads == 0, f"{v_heads} value heads on {k_heads} key heads"
    assert k_dim <= CHUNK and v_dim <= CHUNK, f"dk={k_dim}, dv={v_dim}: at most {CHUNK}"  # noqa: PT018
    dtype = query.dtype
    num_chunks = (length + CHUNK - 1) // CHUNK
    num_checkpoints = length // (CHUNK * checkpoint_chunks) if checkpoint_chunks else 0
    out = nl.ndarray((num_sequences, v_heads, length, v_dim), dtype, buffer=nl.shared_hbm)
    final = nl.ndarray((num_sequences, k_dim, v_heads, v_dim), nl.float32, buffer=nl.shared_hbm)
    checkpoints = None
    if num_checkpoints:
        shape = (num_sequences, num_checkpoints, k_dim, v_heads, v_dim)
        checkpoints = nl.ndarray(shape, nl.float32, buffer=nl.shared_hbm)
    constants = load_constants(planes, pair_masks, dtype, norm_weight, v_dim)

    num_lanes = num_sequences * v_heads
    share = (num_lanes + nl.num_programs(0) - 1) // nl.num_programs(0)
    first_lane = nl.program_id(0) * share
    for lane in range(first_lane, min(first_lane + share, num_lanes)):
        sequence, v_head = lane // v_heads, lane % v_heads
        head = Head(sequence, v_head, v_head * k_heads // v_heads, length, k_dim, v_dim, scale, eps)
        state = nl.ndarray((k_dim, v_dim), nl.float32)
        if initial_state is None:
            nisa.memset(state, 0.0)
        else:
            nisa.dma_copy(state, initial_state[sequence, :, v_head])
        head.start(state, dtype)
        solved: list[Chunk] = []
        for base in range(0, num_chunks + group_chunks, group_chunks):
            size = min(group_chunks, num_chunks - base)
            group: list[Chunk] = []
            if size > 0:
                columns = gates(head, constants, g, beta, base, size, valid_len, a_log, dt_bias)
                group = [load_chunk(head, query, key, value, base + i, l2_norm, constants) for i in range(size)]
                for i in range(size):
                    interaction(head, constants, columns, group[i], i)
            for phase in range(NUM_INVERT_PHASES):
                for chunk in group:
                    invert(phase, constants, chunk)
                if phase % 2 and phase // 2 < len(solved):
                    _advance(head, constants, solved[phase // 2], gate, out, checkpoints, checkpoint_chunks)
            for chunk in solved[NUM_INVERT_PHASES // 2 :]:
                _advance(head, constants, chunk, gate, out, checkpoints, checkpoint_chunks)
            for chunk in group:
                close_inverse(chunk, dtype)
            solved = group
        nisa.dma_copy(final[sequence, :, v_head], head.state)
    return (out, final) if checkpoints is None else (out, final, checkpoints)


def _advance(
    head: Head, constants: Constants, chunk: Chunk, gate: Any, out: Any, checkpoints: Any, checkpoint_chunks: int
) -> None:
    """The recurrence over one chunk, and its checkpoint where one is due."""
    recur(head, constants, chunk, gate, out)
    boundary = chunk.index + 1
    if checkpoints is None or boundary % checkpoint_chunks or boundary * CHUNK > head.length:
        return
    nisa.dma_copy(checkpoints[head.sequence, boundary // checkpoint_chunks - 1, :, head.v_head], head.state)
