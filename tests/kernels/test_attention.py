"""Paged attention by key tiles equals one softmax over all keys."""

import numpy as np
import pytest
import torch

from warmstate.kernels.attention_torch import attend
from warmstate.models.attention_layout import build_query_tiles
from warmstate.models.backend import BLOCK_TOKENS, PlanRow, StepPlan

NUM_BLOCKS = 60


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("rows", [[(0, 1)], [(0, 63), (64, 1), (511, 1), (512, 2)], [(640, 65), (0, 700), (1000, 1)]])
def test_every_query_attends_to_its_own_sequence_up_to_itself(
    rows: list[tuple[int, int]], heads: tuple[int, int], deterministic: bool
) -> None:
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, NUM_BLOCKS, kv_heads, BLOCK_TOKENS, 16, generator=generator)
    pages[:, 0] = 0.0
    free = iter(torch.randperm(NUM_BLOCKS - 1, generator=generator).add(1).tolist())
    plan_rows = []
    for start, count in rows:
        table = [next(free) for _ in range(-(-(start + count) // BLOCK_TOKENS))]
        plan_rows.append(PlanRow(0, 0, start, count, np.array([*table, NUM_BLOCKS - 1], dtype=np.int32), sample=True))
    plan = StepPlan(0, tuple(plan_rows))
    queries = torch.randn(plan.num_tokens, num_heads, 16, generator=generator)
    firsts = np.cumsum([0, *(row.count for row in plan_rows)])[:-1]
    out = torch.full_like(queries, float("nan"))
    flat = pages.view(2, NUM_BLOCKS * kv_heads, BLOCK_TOKENS, 16)
    for tiles in build_query_tiles(plan, firsts, num_heads, kv_heads, deterministic):
        attend(queries, flat[0], flat[1], kv_heads, tiles, out)
    for row, first in zip(plan_rows, firsts, strict=True):
        blocks = torch.from_numpy(row.block_table[:-1]).long()
        keys, values = (part[blocks].transpose(1, 2).flatten(0, 1) for part in pages)
        keys, values = (x.repeat_interleave(num_heads // kv_heads, dim=1) for x in (keys, values))
        scores = torch.einsum("thd,khd->htk", queries[first : first + row.count], keys)
        future = torch.arange(len(keys)) > torch.arange(row.start, row.start + row.count)[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        expected = torch.einsum("htk,khd->thd", weights, values)
        torch.testing.assert_close(out[first : first + row.count], expected, atol=1e-5, rtol=1e-4)


def test_keys_after_the_query_may_hold_anything_and_values_anything_finite() -> None:
    generator = torch.Generator().manual_seed(1)
    pages = torch.randn(2, 2, 1, BLOCK_TOKENS, 8, generator=generator)
    pages[:, 0] = 0.0
    plan = StepPlan(0, (PlanRow(0, 0, 0, 10, np.array([1], dtype=np.int32), sample=True),))
    queries = torch.randn(10, 1, 8, generator=generator)
    results = []
    for key, value in ((0.0, 0.0), (float("nan"), 1e30)):
        pages[0, 1, :, 10:], pages[1, 1, :, 10:] = key, value
        out = torch.empty_like(queries)
        for tiles in build_query_tiles(plan, np.array([0]), 1, 1, deterministic=False):
            attend(queries, pages[0].flatten(0, 1), pages[1].flatten(0, 1), 1, tiles, out)
        results.append(out)
    assert torch.equal(results[0], results[1])
