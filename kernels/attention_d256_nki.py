"""Owns causal grouped-query attention with heads of 256 on trn2: prefill over pages and the new chunk, paged decode.

Simulated only (`nki_sim`); never run on a device. The truth is softmax(q k^T) v, as in `attention_torch.attend`.
"""

from typing import Any

import nki
import nki.language as nl

from warmstate.kernels.attention_running_nki import Piece, Running, attend
from warmstate.kernels.attention_tile_nki import KEYS, OwnTile, PagedTile, Tables

ROWS = 128
SIDE_BY_SIDE = 4
"""Sets of 128 queries that go through the keys together."""

KEPT_TILES = 4
"""Tiles of pages that are kept for all queries of a head; more are gathered again for each SIDE_BY_SIDE sets."""


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

    Pseudocode, per query head and 128 queries, over tiles of keys (flash attention):
        s = q k^T, masked;  m' = max(m, max s);  p = exp(scale * (s - m')),  c = exp(scale * (m - m'))
        l = l * c + sum p;  o = o * c + p v;  at the end o / l * sigmoid(gate)
    q and k meet with their dimensions on the partitions, in D / 128 accumulated products; k is turned around once per
    tile and key head (with more than KEPT_TILES tiles of pages, once per SIDE_BY_SIDE sets of queries), p once per use,
    on the tensor engine. Pages are gathered by rows of several tokens, a tile with one instruction. The stages of
    several tiles overlap (`attend`). Key heads are shared out over the programs (LNC2).

    Maths: https://arxiv.org/abs/2205.14135, HF `Qwen3NextAttention` (the output gate).
    """
    num_tokens, q_heads, width = query.shape
    k_heads = key.shape[1]
    group = q_heads // k_heads
    assert group * k_heads == q_heads, f"{q_heads} query heads on {k_heads} key heads"
    assert width % ROWS == 0, f"heads of {width}: a multiple of {ROWS}"
    out = nl.ndarray(query.shape, query.dtype, buffer=nl.shared_hbm)
    tables = Tables(key_pages, block_table.reshape((1, block_table.shape[0])), prior_len)
    share = (k_heads + nl.num_programs(0) - 1) // nl.num_programs(0)
    first = nl.program_id(0) * share
    pieces = []
    for head in range(first, min(first + share, k_heads)):
        pages = (key_pages, value_pages)
        paged: list[PagedTile] = []
        own = [OwnTile(key[:, head], value[:, head], start) for start in range(0, num_tokens, KEYS)]
        rows = [
            (q_head, slice(start, min(start + ROWS, num_tokens)))
            for q_head in range(head * group, (head + 1) * group)
            for start in range(0, num_tokens, ROWS)
        ]
        for base in range(0, len(rows), SIDE_BY_SIDE):
            together = [
                (Running(query[at, i], scale, out[at, i], None if gate is None else gate[at, i]), at)
                for i, at in rows[base : base + SIDE_BY_SIDE]
            ]
            if tables.num_tiles > KEPT_TILES or not paged:
                paged = [PagedTile(tables, pages, 0, head, tile) for tile in range(tables.num_tiles)]
            pieces += [Piece(running, tile) for tile in paged for running, _ in together]
            pieces += [
                Piece(running, tile, at.start - tile.start)
                for tile in own
                for running, at in together
                if tile.start < at.stop
            ]
    attend(pieces)
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
    num_sequences, q_heads, _ = query.shape
    k_heads = key_pages.shape[1]
    group = q_heads // k_heads
    assert group * k_heads == q_heads, f"{q_heads} query heads on {k_heads} key heads"
    assert group <= ROWS, f"{group} query heads per key head: at most {ROWS}"
    out = nl.ndarray(query.shape, query.dtype, buffer=nl.shared_hbm)
    share = (num_sequences + nl.num_programs(0) - 1) // nl.num_programs(0)
    first = nl.program_id(0) * share
    last = min(first + share, num_sequences)
    if first < last:
        tables = Tables(key_pages, block_tables[first:last], lengths[first:last])
    pairs = [(sequence, head) for sequence in range(first, last) for head in range(k_heads)]
    pieces = []
    for base in range(0, len(pairs), SIDE_BY_SIDE):
        together = []
        for sequence, head in pairs[base : base + SIDE_BY_SIDE]:
            own = slice(head * group, (head + 1) * group)
            own_gate = None if gate is None else gate[sequence, own]
            together.append((Running(query[sequence, own], scale, out[sequence, own], own_gate), sequence, head))
        pieces += [
            Piece(running, PagedTile(tables, (key_pages, value_pages), sequence - first, head, tile))
            for tile in range(tables.num_tiles)
            for running, sequence, head in together
        ]
    attend(pieces)
    return out
