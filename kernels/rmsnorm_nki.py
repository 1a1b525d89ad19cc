"""Owns RMSNorm on trn2. Simulated only (`nki_sim`); never run on a device. The truth is `norm_torch.rms_norm`."""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

TILE_TOKENS = 128


@nki.jit
def rmsnorm(x: Any, weight: Any, eps: float = 1e-6, zero_centred: bool = False) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32.

    Dimensions: T tokens (any number), C channels (float32 tiles of C must fit a partition: at most about 8192).

    Arguments, in HBM: x [T, C] float32 or bfloat16; weight [C] float32. zero_centred: 1 + weight, as Qwen3-Next has it.
    Returns [T, C] of x's dtype.

    Pseudocode, 128 tokens at a time: total = sum(x^2) beside the squares, on the scalar engine;
    out = (x * rsqrt(total / C + eps)) * weight, in one pass. Tiles are shared out over the programs (LNC2).

    Maths: https://arxiv.org/abs/1910.07467, HF `Qwen3NextRMSNorm`.
    """
    num_tokens, width = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    scale = nl.ndarray((TILE_TOKENS, width), nl.float32)
    nisa.dma_copy(scale, weight.ap([[0, TILE_TOKENS], [1, width]]))
    if zero_centred:
        nisa.tensor_scalar(scale, scale, nl.add, 1.0)
    num_tiles = (num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    for tile in range(nl.program_id(0), num_tiles, nl.num_programs(0)):
        tokens = slice(tile * TILE_TOKENS, min((tile + 1) * TILE_TOKENS, num_tokens))
        count = tokens.stop - tokens.start
        rows = nl.load(x[tokens])
        squares, rms = nl.ndarray((count, width), nl.float32), nl.ndarray((count, 1), nl.float32)
        nisa.activation_reduce(squares, nl.square, rows, nl.add, rms)
        nisa.activation(rms, nl.rsqrt, rms, scale=1.0 / width, bias=eps)
        result = nl.ndarray((count, width), x.dtype)
        nisa.scalar_tensor_tensor(result, rows, nl.multiply, rms, nl.multiply, scale[0:count])
        nisa.dma_copy(out[tokens], result)
    return out
