"""Owns the decode of the gated delta rule on trn2: one token, or a few to verify, of each of B sequences.

Simulated only (`nki_sim`); never run on a device. The truth is `gated_delta_torch.recurrence`.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from warmstate.kernels.gdn_step_nki import (
    Batch,
    Step,
    load_constants,
    load_states,
    load_step,
    prepare,
    solve,
    store_outputs,
    store_state,
    update,
)

MAX_PAIRS = 64
"""(sequence, value head) pairs worked on together: their vectors are the columns of one tile."""

HEADS_AT_ONCE = ((4, 2), (64, 4), (None, 8))
"""(up to this many pairs, heads whose state moves in one transfer).

Few, so that work begins early and the last transfer is short; many, so that the runs of each partition are long.
"""


@nki.jit
def gdn_decode(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    states: Any,
    slots: Any,
    eye: Any,
    a_log: Any = None,
    dt_bias: Any = None,
    gate: Any = None,
    norm_weight: Any = None,
    scale: float = 1.0,
    l2_norm: bool = False,
    all_states: bool = False,
    eps: float = 1e-6,
) -> Any:
    """T tokens of each of B sequences, whose states lie in slots.

    Dimensions: T tokens (1 to decode, more to verify a draft), B sequences, Hk key heads, Hv <= 64 value heads (a
    multiple of Hk), dk, dv <= 128, N slots.

    Arguments, all in HBM:
        query, key [T, B, Hk, dk], value [T, B, Hv, dv]: float32 or bfloat16; all arithmetic is float32.
        g, beta [T, B, Hv] float32: log decay and write strength; raw projections with `a_log`, `dt_bias` [Hv] float32.
        states [N, dk, Hv, dv] float32: updated in place, and returned. The heads of a row lie together, so that a
            partition moves Hv * dv * 4 bytes at once.
        slots [B] int32: the slot of each sequence; one that is out of range reads zeros and writes nothing.
        eye [128, 128] float32: the identity.
        gate [T, B, Hv, dv], norm_weight [dv] float32: o = rms_norm(o) * norm_weight * silu(gate), if given.
        l2_norm: q and k are normalised here. all_states: also return the state after each token.

    Returns out [T, B, Hv, dv] of query's dtype, states, and with all_states [T, B, dk, Hv, dv] float32.

    Pseudocode, per token and pair, S [dk, dv]; all but the two products with S is known before S arrives:
        delta = beta * v + (-beta * exp(g) * k) S;  asked = (scale * exp(g) * q) S
        S = exp(g) * S + k^T delta;  o = asked + scale * (q . k) * delta

    The state is the stationary operand of one matmul with k and q as its two columns, so that it is read once; all
    other vectors are columns [dv, pairs] of one tile. The states of the next batch are on their way while one is worked
    on. Sequences are shared out over the programs (LNC2).

    Maths: https://arxiv.org/abs/2412.06464, HF `torch_recurrent_gated_delta_rule`.
    """
    num_tokens, num_sequences, k_heads, k_dim = query.shape
    v_heads, v_dim = value.shape[2], value.shape[3]
    assert v_heads % k_heads == 0, f"{v_heads} value heads on {k_heads} key heads"
    assert v_heads <= MAX_PAIRS, f"{v_heads} value heads: at most {MAX_PAIRS}"
    assert k_dim <= 128 and v_dim <= 128, f"dk={k_dim}, dv={v_dim}: at most 128"  # noqa: PT018
    out = nl.ndarray((num_tokens, num_sequences, v_heads, v_dim), query.dtype, buffer=nl.shared_hbm)
    steps = None
    if all_states:
        steps = nl.ndarray((num_tokens, num_sequences, k_dim, v_heads, v_dim), nl.float32, buffer=nl.shared_hbm)
    share = (num_sequences + nl.num_programs(0) - 1) // nl.num_programs(0)
    first = nl.program_id(0) * share
    last = min(first + share, num_sequences)
    together = MAX_PAIRS // v_heads
    at_once = _heads_at_once((last - first) * v_heads)
    batches = [
        Batch(base - first, base, min(together, last - base), (k_heads, v_heads), (k_dim, v_dim), at_once)
        for base in range(first, last, together)
    ]
    if batches:
        constants = load_constants(slots[first:last], eye, a_log, dt_bias, norm_weight, together * v_heads)

    def load(batch: Batch) -> list[Step]:
        tokens = [
            load_step(batch, query[t], key[t], value[t], g[t], beta[t], None if gate is None else gate[t])
            for t in range(num_tokens)
        ]
        load_states(batch, constants, states)
        return tokens

    loaded = load(batches[0]) if batches else []
    for n, batch in enumerate(batches):
        tokens, loaded = loaded, load(batches[n + 1]) if n + 1 < len(batches) else []
        for step in tokens:
            prepare(batch, constants, step, scale, l2_norm, eps)
        for token, step in enumerate(tokens):
            for part in batch.parts:
                solve(batch, step, part)
                update(batch, constants, step, part)
                if steps is not None:
                    nisa.dma_copy(steps[token, batch.base + part.sequence, :, part.heads], part.state)
                if token == num_tokens - 1:
                    store_state(batch, constants, states, part)
            store_outputs(batch, constants, step, eps, out[token])
    return (out, states) if steps is None else (out, states, steps)


def _heads_at_once(num_pairs: int) -> int:
    return next(heads for most, heads in HEADS_AT_ONCE if most is None or num_pairs <= most)
