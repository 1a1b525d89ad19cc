"""Owns the router of the mixture of experts on trn2: softmax over all experts, the largest k, renormalised.

Simulated only (`nki_sim`); never run on a device. The truth is softmax and topk, as in HF `Qwen3NextSparseMoeBlock`.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

TILE_TOKENS = 128
AT_ONCE = 8
REMOVED = -3.0e38
"""What a logit becomes once it is chosen."""


@nki.jit
def router_topk(logits: Any, k: int, renormalise: bool = True) -> Any:
    """The k largest of softmax(logits) per token, largest first.

    Dimensions: T tokens (any number), E experts (8 to 16384; 256 or 512 here), k experts chosen (8 or 10).

    Arguments, in HBM: logits [T, E] float32, each above -3e38. renormalise: the k weights sum to 1.
    Returns weights [T, k] float32 and indices [T, k] uint32. Equal logits are taken from the lower index on.

    Pseudocode, 128 tokens at a time:
        eight = max8(logits), where = find_index8(logits, eight); remove them; again until k are found
        weights = exp(chosen - chosen_0) / (sum of them, or of exp(logits - chosen_0))
    The softmax is computed on k values: its maximum is the first, and its sum cancels when renormalised. Tiles are
    shared out over the programs (LNC2).
    """
    num_tokens, num_experts = logits.shape
    assert 1 <= k <= num_experts, f"{k} of {num_experts} experts"
    rounds = (k + AT_ONCE - 1) // AT_ONCE
    weights = nl.ndarray((num_tokens, k), nl.float32, buffer=nl.shared_hbm)
    indices = nl.ndarray((num_tokens, k), nl.uint32, buffer=nl.shared_hbm)
    num_tiles = (num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    for tile in range(nl.program_id(0), num_tiles, nl.num_programs(0)):
        tokens = slice(tile * TILE_TOKENS, min((tile + 1) * TILE_TOKENS, num_tokens))
        count = tokens.stop - tokens.start
        rows = nl.load(logits[tokens])
        top = nl.ndarray((count, rounds * AT_ONCE), nl.float32)
        chosen = nl.ndarray((count, rounds * AT_ONCE), nl.uint32)
        left = rows
        for n in range(rounds):
            own = slice(n * AT_ONCE, (n + 1) * AT_ONCE)
            nisa.max8(top[:, own], left)
            nisa.nc_find_index8(chosen[:, own], left, top[:, own])
            if n + 1 < rounds:
                rest = nl.ndarray((count, num_experts), nl.float32)
                nisa.nc_match_replace8(rest, left, top[:, own], REMOVED)
                left = rest
        least, total = nl.ndarray((count, 1), nl.float32), nl.ndarray((count, 1), nl.float32)
        nisa.tensor_scalar(least, top[:, 0:1], nl.multiply, -1.0)
        result = nl.ndarray((count, k), nl.float32)
        if renormalise:
            nisa.activation_reduce(result, nl.exp, top[:, 0:k], nl.add, total, bias=least)
        else:
            everything = nl.ndarray((count, num_experts), nl.float32)
            nisa.activation_reduce(everything, nl.exp, rows, nl.add, total, bias=least)
            nisa.activation(result, nl.exp, top[:, 0:k], bias=least)
        nisa.reciprocal(total, total)
        nisa.tensor_scalar(result, result, nl.multiply, total)
        nisa.dma_copy(weights[tokens], result)
        nisa.dma_copy(indices[tokens], chosen[:, 0:k])
    return weights, indices
