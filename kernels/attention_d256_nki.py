"""Owns causal grouped-query attention with heads of 256 on trn2: prefill over pages and the new chunk, paged decode.

Simulated only (`nki_sim`); never run on a device. The truth is softmax(q k^T) v, as in `attention_torch.attend`.
"""

from typing import Any

import nki
import nki.language as nl

from warmstate.kernels.attention_tile_nki import KEYS, Running, Tables, add_tile, load_keys, load_paged, load_queries

ROWS = 128
SIDE_BY_SIDE = 4
"""Sets of 128 queries that go through the keys together."""


@nki.jit
def attention_prefill(
    query: Any,
    key: Any,
    value: Any,
    key_pages: Any,
    value_pages: Any,
    block_table: Any,
    prior_len: Any,
    gate: Any = None,
    scale: float = 1.0,
) -> Any:
    """softmax(scale * q k^T) v of a chunk of T tokens of one sequence, over what came before it and itself.

    Dimensions: T tokens (any number), Hq query heads, Hk key heads (Hq a multiple), D = 256 (a multiple of 128),
    N pages of P tokens (P divides 128), M table entries.

    Arguments, all in HBM:
        query [T, Hq, D], key, value [T, Hk, D]: float32 or bfloat16, normed and rotated.
        key_pages, value_pages [N, Hk, P, D] of the same dtype. block_table [M] int32: the pages before the chunk; an
            entry out of range is read as zeros. prior_len [1, 1] int32: how many tokens of them count; what is
            stored after them must be finite.
        gate [T, Hq, D]: the result is multiplied by sigmoid(gate), if given.

    Returns [T, Hq, D] of query's dtype.

    Pseudocode, per query head and 128 queries, over tiles of 128 * n keys (flash attention):
        s = q k^T, masked;  m' = max(m, max s);  p = exp(scale * (s - m')),  c = exp(scale * (m - m'))
        l = l * c + sum p;  o = o * c + p v;  at the end o / l * sigmoid(gate)
    q and k meet with their dimensions on the partitions, in D / 128 accumulated products; k is turned around once per
    tile and key head, p once per use, on the tensor engine. Key heads are shared out over the programs (LNC2).

    Maths: https://arxiv.org/abs/2205.14135, HF `Qwen3NextAttention` (the output gate).
    """
    num_tokens, q_heads, width = query.shape
    k_heads = key.shape[1]
    group = q_heads // k_heads
    assert group * k_heads == q_heads, f"{q_heads} query heads on {k_heads} key heads"
    assert width % ROWS == 0, f"heads of {width}: a multiple of {ROWS}"
    out = nl.ndarray(query.shape, query.dtype, buffer=nl.shared_hbm)
    tables = Tables(query.dtype, block_table, prior_len, scale, key_pages.shape[2])
    share = (k_heads + nl.num_programs(0) - 1) // nl.num_programs(0)
    first = nl.program_id(0) * share
    for head in range(first, min(first + share, k_heads)):
        paged = [load_paged(tables, key_pages, value_pages, head, start) for start in range(0, tables.num_prior, KEYS)]
        own = [load_keys(tables, key[:, head], value[:, head], start) for start in range(0, num_tokens, KEYS)]
        rows = [
            (q_head, slice(start, min(start + ROWS, num_tokens)))
            for q_head in range(head * group, (head + 1) * group)
            for start in range(0, num_tokens, ROWS)
        ]
        for base in range(0, len(rows), SIDE_BY_SIDE):
            together = rows[base : base + SIDE_BY_SIDE]
            running = [
                Running(tables, load_queries(tables, query[tokens, q_head]), tokens.stop - tokens.start, width)
                for q_head, tokens in together
            ]
            for tile in paged:
                add_tile(running, [None] * len(running), tile)
            for tile in own:
                seeing = [i for i, (_, tokens) in enumerate(together) if tile.start < tokens.stop]
                diagonals: list[int | None] = [together[i][1].start - tile.start for i in seeing]
                add_tile([running[i] for i in seeing], diagonals, tile)
            for queries, (q_head, tokens) in zip(running, together, strict=True):
                queries.store(out[tokens, q_head], None if gate is None else gate[tokens, q_head])
    return out


@nki.jit
def attention_decode(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    block_tables: Any,
    lengths: Any,
    gate: Any = None,
    scale: float = 1.0,
) -> Any:
    """softmax(scale * q k^T) v of one token of each of B sequences, over their pages (the token's own included).

    Dimensions: B sequences, Hq query heads, Hk key heads, D a multiple of 128, N pages of P tokens, M table entries.

    Arguments, all in HBM: query [B, Hq, D]; key_pages, value_pages [N, Hk, P, D]; block_tables [B, M] int32, an entry
    out of range is read as zeros; lengths [B, 1] int32 (at least 1): how many tokens count;
    gate [B, Hq, D]: the result is multiplied by sigmoid(gate).

    Returns [B, Hq, D] of query's dtype.

    Pseudocode: as in `attention_prefill`, the queries of a tile being the query heads of one key head. Sequences are
    shared out over the programs (LNC2).
    """
    num_sequences, q_heads, width = query.shape
    k_heads = key_pages.shape[1]
    group = q_heads // k_heads
    assert group * k_heads == q_heads, f"{q_heads} query heads on {k_heads} key heads"
    assert group <= ROWS, f"{group} query heads per key head: at most {ROWS}"
    out = nl.ndarray(query.shape, query.dtype, buffer=nl.shared_hbm)
    share = (num_sequences + nl.num_programs(0) - 1) // nl.num_programs(0)
    first = nl.program_id(0) * share
    for sequence in range(first, min(first + share, num_sequences)):
        tables = Tables(query.dtype, block_tables[sequence], lengths[sequence], scale, key_pages.shape[2])
        for head in range(k_heads):
            heads = slice(head * group, (head + 1) * group)
            running = Running(tables, load_queries(tables, query[sequence, heads]), group, width)
            for start in range(0, tables.num_prior, KEYS):
                add_tile([running], [None], load_paged(tables, key_pages, value_pages, head, start))
            running.store(out[sequence, heads], None if gate is None else gate[sequence, heads])
    return out
