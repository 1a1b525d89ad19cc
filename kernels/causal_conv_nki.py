"""Owns the causal depthwise convolution with SiLU on trn2: prefill with carried state, and one step on slots.

Simulated only (`nki_sim`); never run on a device. The truth is `causal_conv_torch.causal_conv`.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128
TILE_TOKENS = 1024
"""Tokens computed at a time: 4 KiB of float32 per partition and tile."""


@nki.jit
def causal_conv_prefill(
    x: Any, taps: Any, state: Any, valid_len: Any = None, checkpoint_tokens: int = 0, tile_tokens: int = TILE_TOKENS
) -> Any:
    """silu(sum_j taps[c, j] x[c, t - K + 1 + j]) per channel; tokens before the first come from `state`.

    Dimensions: B sequences, C channels (any number), S tokens (any number), K taps, N = S // checkpoint_tokens.

    Arguments, all in HBM:
        x [B, C, S] float32 or bfloat16: channels on the partitions, tokens next to each other.
        taps [C, K] float32. state [B, C, K - 1] of x's dtype: the K - 1 inputs before the first token.
        valid_len [B, 1] int32: the state after counts from there; all S tokens are computed. S if None.
        checkpoint_tokens: the state is written every so many tokens (at least K - 1); never if 0.

    Returns out [B, C, S] of x's dtype, the state after [B, C, K - 1], and, where N > 0, checkpoints [B, N, C, K - 1].

    Pseudocode, per sequence, 128 channels and tile of tokens:
        held = [the K - 1 inputs before the tile | the tile];  out = silu(sum_j taps[:, j] * held[:, j : j + tokens])
    The state after is the last K - 1 of [state | x[: valid_len]]; with `valid_len` that is one read at a run-time
    offset. Sequences are shared out over the programs (LNC2).

    Maths: HF `causal_conv1d_fn` with activation "silu"; the conv state as in HF `Qwen3NextGatedDeltaNet`.
    """
    num_sequences, num_channels, length = x.shape
    carry = taps.shape[1] - 1
    assert carry >= 1, "one tap is no convolution"
    num_checkpoints = length // checkpoint_tokens if checkpoint_tokens else 0
    assert not num_checkpoints or checkpoint_tokens >= carry, f"checkpoints every {checkpoint_tokens} of {carry} inputs"
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    after = nl.ndarray(state.shape, x.dtype, buffer=nl.shared_hbm)
    checkpoints: Any = None
    if num_checkpoints:
        shape = (num_sequences, num_checkpoints, num_channels, carry)
        checkpoints = nl.ndarray(shape, x.dtype, buffer=nl.shared_hbm)
    share = (num_sequences + nl.num_programs(0) - 1) // nl.num_programs(0)
    first = nl.program_id(0) * share
    for sequence in range(first, min(first + share, num_sequences)):
        for base in range(0, num_channels, PARTITIONS):
            channels = slice(base, min(base + PARTITIONS, num_channels))
            own_taps = nl.load(taps[channels])
            for start in range(0, length, tile_tokens):
                tokens = slice(start, min(start + tile_tokens, length))
                held = _load_tile(x[sequence, channels], state[sequence, channels], tokens, carry)
                result = _convolved(held, own_taps, tokens.stop - tokens.start, x.dtype)
                nisa.dma_copy(out[sequence, channels, tokens], result)
            lengths = None if valid_len is None else valid_len[sequence]
            _store_after(x[sequence, channels], state[sequence, channels], after[sequence, channels], lengths)
            for n in range(num_checkpoints):
                end = (n + 1) * checkpoint_tokens
                tile = nl.load(x[sequence, channels, end - carry : end])
                nisa.dma_copy(checkpoints[sequence, n, channels], tile)
    return (out, after) if checkpoints is None else (out, after, checkpoints)


def _load_tile(x: Any, state: Any, tokens: slice, carry: int) -> Any:
    """[channels, carry + tokens]: the inputs before the tile, from `state` where there are none, and the tile."""
    count = tokens.stop - tokens.start
    held = nl.ndarray((x.shape[0], carry + count), x.dtype)
    missing = max(0, carry - tokens.start)
    if missing:
        nisa.dma_copy(held[:, 0:missing], state[:, carry - missing : carry])
    nisa.dma_copy(held[:, missing : carry + count], x[:, tokens.start - carry + missing : tokens.stop])
    return held


def _convolved(held: Any, taps: Any, count: int, dtype: Any) -> Any:
    """silu of the taps' weighted sum, accumulated in float32."""
    total = nl.ndarray((held.shape[0], count), nl.float32)
    nisa.tensor_scalar(total, held[:, 0:count], nl.multiply, taps[:, 0:1])
    for tap in range(1, taps.shape[1]):
        shifted = held[:, tap : tap + count]
        nisa.scalar_tensor_tensor(total, shifted, nl.multiply, taps[:, tap : tap + 1], nl.add, total)
    result = nl.ndarray((held.shape[0], count), dtype)
    nisa.activation(result, nl.silu, total)
    return result


def _store_after(x: Any, state: Any, after: Any, valid_len: Any) -> None:
    """The last inputs of [state | x], counted from the end or from valid_len."""
    num_channels, length = x.shape
    carry = state.shape[1]
    if valid_len is None:
        kept = max(0, carry - length)
        tile = nl.ndarray((num_channels, carry), x.dtype)
        if kept:
            nisa.dma_copy(tile[:, 0:kept], state[:, carry - kept : carry])
        nisa.dma_copy(tile[:, kept:carry], x[:, length - carry + kept : length])
        nisa.dma_copy(after, tile)
        return
    joined = nl.ndarray((num_channels, carry + length), x.dtype, buffer=nl.private_hbm)
    nisa.dma_copy(joined[:, 0:carry], state)
    nisa.dma_copy(joined[:, carry : carry + length], x)
    where = nl.ndarray((1, 1), nl.int32)
    nisa.dma_copy(where, valid_len)
    pattern = [[carry + length, num_channels], [1, carry]]
    tile = nl.ndarray((num_channels, carry), x.dtype)
    nisa.dma_copy(tile, joined.ap(pattern, scalar_offset=where, indirect_dim=1))
    nisa.dma_copy(after, tile)


@nki.jit
def causal_conv_step(x: Any, taps: Any, states: Any, slots: Any) -> Any:
    """One token of each of B sequences, whose K - 1 last inputs lie in slots.

    Dimensions: B sequences, C channels (a multiple of 128, or at most 128), K taps, N slots.

    Arguments, all in HBM: x [B, C] float32 or bfloat16; taps [C, K] float32; states [N, C, K - 1] of x's dtype, updated
    in place and returned; slots [B] int32, one that is out of range reads zeros and writes nothing.

    Returns out [B, C] of x's dtype, and states.

    Pseudocode: window = [states[slot] | x];  out = silu(sum_j taps[:, j] * window[:, j]);  states[slot] = window[:, 1:]
    A partition holds C / 128 channels that lie together in memory. Sequences are shared out over the programs (LNC2).
    """
    num_sequences, num_channels = x.shape
    carry = taps.shape[1] - 1
    rows = min(PARTITIONS, num_channels)
    each = num_channels // rows
    assert rows * each == num_channels, f"{num_channels} channels: a multiple of {PARTITIONS}, or at most that"
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    own_taps = nl.ndarray((rows, each, carry + 1), nl.float32)
    nisa.dma_copy(own_taps, taps.reshape((rows, each, carry + 1)))
    where = nl.ndarray((1, num_sequences), nl.int32)
    nisa.dma_copy(where, slots)
    share = (num_sequences + nl.num_programs(0) - 1) // nl.num_programs(0)
    first = nl.program_id(0) * share
    for i in range(first, min(first + share, num_sequences)):
        pattern = [[each * carry, rows], [carry, each], [1, carry]]
        slot = states.ap(pattern, scalar_offset=where[:, i : i + 1], indirect_dim=0)
        before = nl.ndarray((rows, each, carry), x.dtype)
        nisa.memset(before, 0.0)
        nisa.dma_copy(before, slot, oob_mode=nisa.oob_mode.skip)
        window = nl.ndarray((rows, each, carry + 1), x.dtype)
        nisa.tensor_copy(window[:, :, 0:carry], before)
        nisa.dma_copy(window[:, :, carry], x[i].reshape((rows, each)))
        nisa.dma_copy(slot, window[:, :, 1:], oob_mode=nisa.oob_mode.skip)
        product = nl.ndarray((rows, each, carry + 1), nl.float32)
        nisa.tensor_tensor(product, window, own_taps, nl.multiply)
        total = nl.ndarray((rows, each), nl.float32)
        nisa.tensor_reduce(total, nl.add, product, axis=2)
        result = nl.ndarray((rows, each), x.dtype)
        nisa.activation(result, nl.silu, total)
        nisa.dma_copy(out[i].reshape((rows, each)), result)
    return out, states
