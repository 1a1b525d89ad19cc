"""A model cut over tensor- or expert-parallel ranks computes what one rank computes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from warmstate.models.errors import UnsupportedLayout
from warmstate.models.ranks import RankGroups, RankSlice, SingleRank
from warmstate.models.torch_backend import TorchBackend


class ThreadGroup:
    """Ranks that are threads of this process: every one adds the same partials in rank order."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._partials: list[torch.Tensor | None] = [None] * size

    def rank(self, rank: int) -> "ThreadRank":
        return ThreadRank(self, rank)

    def exchange(self, rank: int, partial: torch.Tensor) -> list[torch.Tensor]:
        self._partials[rank] = partial.clone()
        self._barrier.wait()
        partials = [part for part in self._partials if part is not None]
        self._barrier.wait()
        return partials


class ThreadRank:
    """One thread's communicator."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._group.exchange(self._rank, partial)).sum(0)

    def all_gather(self, shard: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._group.exchange(self._rank, shard), dim=dim)


def _slices(tp: int, ep: int) -> list[RankSlice]:
    return [RankSlice(t, tp, e, ep) for t in range(tp) for e in range(ep)]


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_ranks_together_give_the_logits_of_one(
    hf_checkpoint: Any, make_driver: Any, random_tokens: Any, tp: int, ep: int
) -> None:
    path, _ = hf_checkpoint("qwen3_next", seed=8, linear_num_key_heads=4, linear_num_value_heads=8)
    tokens = random_tokens(100, 8)
    whole = make_driver(path)
    expected = whole.prefill(whole.open(), tokens), whole.all_logits(tokens[:3])
    driver_class = type(whole)
    tp_groups, ep_groups = [ThreadGroup(tp) for _ in range(ep)], [ThreadGroup(ep) for _ in range(tp)]

    def run(ranks: RankSlice) -> tuple[torch.Tensor, torch.Tensor]:
        groups = RankGroups(
            tp_groups[ranks.ep_rank].rank(ranks.tp_rank) if tp > 1 else SingleRank(),
            ep_groups[ranks.tp_rank].rank(ranks.ep_rank) if ep > 1 else SingleRank(),
        )
        backend = TorchBackend.load(path, torch.float32, True, 4, 8, 512, None, ranks, groups)
        driver = driver_class(backend)
        return driver.prefill(driver.open(), tokens), driver.all_logits(tokens[:3])

    with ThreadPoolExecutor(tp * ep) as pool:
        results = list(pool.map(run, _slices(tp, ep)))
    for prefilled, decoded in results:
        torch.testing.assert_close(prefilled, expected[0], atol=2e-4, rtol=0)
        torch.testing.assert_close(decoded, expected[1], atol=2e-4, rtol=0)
        assert torch.equal(prefilled, results[0][0])


def test_a_degree_that_does_not_divide_the_heads_is_refused(hf_checkpoint: Any) -> None:
    path: Path = hf_checkpoint("qwen3_5_text")[0]
    with pytest.raises(UnsupportedLayout, match="attention heads"):
        TorchBackend.load(path, torch.float32, True, 1, 4, 128, ranks=RankSlice(0, 3))
