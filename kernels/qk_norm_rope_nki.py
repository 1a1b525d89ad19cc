"""Owns the q and k norm with partial rotary embedding on trn2.

Simulated only (`nki_sim`); never run on a device. The truths are `norm_torch.rms_norm` and HF `apply_rotary_pos_emb`.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

TILE_TOKENS = 128


@nki.jit
def qk_norm_rope(x: Any, weight: Any, cos: Any, sin: Any, eps: float = 1e-6, zero_centred: bool = True) -> Any:
    """RMSNorm of each head, then rotation of its first 2R dimensions in pairs (i, i + R), in float32.

    Dimensions: T tokens (any number), H heads, D head size (256), R half of the rotated dimensions (32: 64 of 256).

    Arguments, in HBM: x [T, H, D] float32 or bfloat16; weight [D] float32 (1 + weight if zero_centred);
    cos, sin [T, R] float32. Returns [T, H, D] of x's dtype.

    Pseudocode, 128 tokens at a time, all heads in one tile:
        y = x * rsqrt(mean(x^2) + eps) * (1 + weight)
        out = [y_1 cos - y_2 sin | y_2 cos + y_1 sin | the rest of y]
    Tiles are shared out over the programs (LNC2).

    Maths: HF `Qwen3NextAttention` (q_norm, k_norm), https://arxiv.org/abs/2104.09864.
    """
    num_tokens, num_heads, width = x.shape
    half = cos.shape[1]
    assert 2 * half <= width, f"{2 * half} rotated of {width} dimensions"
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    scale = nl.ndarray((TILE_TOKENS, 1, width), nl.float32)
    nisa.dma_copy(scale, weight.ap([[0, TILE_TOKENS], [1, 1], [1, width]]))
    if zero_centred:
        nisa.tensor_scalar(scale, scale, nl.add, 1.0)
    num_tiles = (num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    for tile in range(nl.program_id(0), num_tiles, nl.num_programs(0)):
        tokens = slice(tile * TILE_TOKENS, min((tile + 1) * TILE_TOKENS, num_tokens))
        count = tokens.stop - tokens.start
        shape = (count, num_heads, width)
        rows = nl.load(x[tokens])
        squares, rms = nl.ndarray(shape, nl.float32), nl.ndarray((count, num_heads, 1), nl.float32)
        nisa.activation(squares, nl.square, rows)
        nisa.tensor_reduce(rms, nl.add, squares, axis=2)
        nisa.activation(rms, nl.rsqrt, rms, scale=1.0 / width, bias=eps)
        normed = nl.ndarray(shape, nl.float32)
        nisa.tensor_tensor(normed, rows, nl.broadcast_to(rms, shape), nl.multiply)
        nisa.tensor_tensor(normed, normed, nl.broadcast_to(scale[0:count], shape), nl.multiply)
        result = nl.ndarray(shape, x.dtype)
        if 2 * half < width:
            nisa.tensor_copy(result[:, :, 2 * half : width], normed[:, :, 2 * half : width], engine=nisa.engine.scalar)
        _rotate(result, normed, nl.load(cos[tokens]), nl.load(sin[tokens]))
        nisa.dma_copy(out[tokens], result)
    return out


def _rotate(result: Any, normed: Any, cos: Any, sin: Any) -> None:
    """The rotated pairs of `normed` [tokens, heads, D] into `result`; cos, sin [tokens, R]."""
    count, num_heads, _ = normed.shape
    half = cos.shape[1]
    shape = (count, num_heads, half)
    cosine, sine = (nl.broadcast_to(table.expand_dim(1), shape) for table in (cos, sin))
    first, second = normed[:, :, 0:half], normed[:, :, half : 2 * half]
    for target, kept, crossed, op in ((0, first, second, nl.subtract), (half, second, first, nl.add)):
        straight, across = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
        nisa.tensor_tensor(straight, kept, cosine, nl.multiply)
        nisa.tensor_tensor(across, crossed, sine, nl.multiply)
        nisa.tensor_tensor(result[:, :, target : target + half], straight, across, op)
