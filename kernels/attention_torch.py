"""Owns causal grouped-query attention over paged keys and values. Knows no sequence, no projection and no rotation.

Keys are read in tiles that start at absolute multiples of the tile size, each tile for all query tiles that see it in
one batched product, with an online softmax in float32 (https://arxiv.org/abs/2205.14135): memory does not grow with the
context, and the order of summation does not depend on the batch.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KeyTile:
    """Where the keys of one tile lie, for the first `num_query_tiles` query tiles.

    `pages` [num_query_tiles * kv_heads * pages per tile] are rows of the page arrays; a page that a query tile does not
    have is page 0, which holds zeros. `masked` says that some query precedes some key.
    """

    start: int
    num_query_tiles: int
    pages: torch.Tensor
    masked: bool


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """N tiles of R query rows, sorted so that the tiles that see a key tile are always the first ones.

    `tokens` [N * R] is the token in each row (any token where the row is padding), `positions` [N, R] its position;
    `rows` and `row_tokens` list the rows that are no padding and their tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    row_tokens: torch.Tensor
    key_tiles: tuple[KeyTile, ...]


def attend(
    queries: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    num_kv_heads: int,
    tiles: QueryTiles,
    out: torch.Tensor,
) -> None:
    """Writes softmax(q k^T) v of the tiles' tokens into `out` [T, heads, head_dim] float32.

    `queries` [T, heads, head_dim] float32 come scaled; `key_pages`, `value_pages` [pages * kv heads, tokens, head_dim]
    in any float dtype. What is stored after a query's position does not matter, but it must be finite.
    """
    num_tiles, num_rows = tiles.positions.shape
    heads, head_dim = queries.shape[1:]
    q = queries.index_select(0, tiles.tokens).view(num_tiles, num_rows, num_kv_heads, -1, head_dim)
    q = q.transpose(1, 2).reshape(num_tiles, num_kv_heads, -1, head_dim)
    softmax = _OnlineSoftmax(q)
    for tile in tiles.key_tiles:
        shape = (tile.num_query_tiles, num_kv_heads, -1, head_dim)
        keys = key_pages.index_select(0, tile.pages).view(shape).float()
        scores = q[: tile.num_query_tiles] @ keys.transpose(-1, -2)
        if tile.masked:
            _mask_future(scores, tiles.positions[: tile.num_query_tiles], tile.start)
        softmax.add(scores, value_pages.index_select(0, tile.pages).view(shape).float())
    result = softmax.result().view(num_tiles, num_kv_heads, num_rows, -1, head_dim).transpose(1, 2)
    result = result.reshape(num_tiles * num_rows, heads, head_dim)
    out.index_copy_(0, tiles.row_tokens, result.index_select(0, tiles.rows))


def _mask_future(scores: torch.Tensor, positions: torch.Tensor, start: int) -> None:
    """Sets the scores of keys after their query to -inf; `scores` [n, kv heads, rows * group, keys]."""
    num_tiles, num_rows = positions.shape
    key_positions = torch.arange(start, start + scores.shape[-1])
    future = key_positions > positions.unsqueeze(-1)
    by_row = scores.view(num_tiles, scores.shape[1], num_rows, -1, scores.shape[-1])
    by_row.masked_fill_(future[:, None, :, None, :], float("-inf"))


class _OnlineSoftmax:
    """Running maximum, sum and weighted values per query; key tiles come in order, the first for every query tile."""

    def __init__(self, queries: torch.Tensor) -> None:
        self._maximum = queries.new_full((*queries.shape[:-1], 1), float("-inf"))
        self._sum = torch.zeros_like(self._maximum)
        self._values = torch.zeros_like(queries)

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Adds one key tile for the first len(scores) query tiles; `scores` is overwritten."""
        maximum, total, weighted = (x[: len(scores)] for x in (self._maximum, self._sum, self._values))
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        shrink = maximum.sub_(new_maximum).exp_()
        weights = scores.sub_(new_maximum).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        weighted.mul_(shrink).add_(weights @ values)
        maximum.copy_(new_maximum)

    def result(self) -> torch.Tensor:
        return self._values.div_(self._sum)
