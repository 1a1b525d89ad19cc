"""Owns which part of a model one rank holds, and how ranks add up. Knows nothing of layers or weights."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from warmstate.models.errors import UnsupportedLayout


@dataclass(frozen=True, slots=True)
class RankSlice:
    """This rank's place: heads and MLP rows are cut over `tp_size`, experts over `ep_size`."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def tp_range(self, total: int, what: str) -> range:
        """The contiguous share of `total` units (heads, rows) of this rank; raises `UnsupportedLayout` if uneven."""
        return _share(total, self.tp_rank, self.tp_size, what)

    def ep_range(self, total: int) -> range:
        """The contiguous share of `total` experts of this rank."""
        return _share(total, self.ep_rank, self.ep_size, "experts")


def _share(total: int, rank: int, size: int, what: str) -> range:
    if total % size:
        raise UnsupportedLayout(
            f"{what}: {total} cannot be cut into {size} equal shares; choose a degree that divides it"
        )
    share = total // size
    return range(rank * share, (rank + 1) * share)


class Communicator(Protocol):
    """The reductions a forward needs. `SingleRank` does nothing; `ProcessGroup` uses torch.distributed."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place where possible; every rank gets the same bits."""
        ...

    def all_gather(self, shard: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenation of every rank's shard along `dim`, in rank order."""
        ...


class SingleRank:
    """The communicator of a model that lives in one rank."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def all_gather(self, shard: torch.Tensor, dim: int) -> torch.Tensor:
        return shard


class ProcessGroup:
    """A communicator over a torch.distributed process group (gloo on the CPU)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._size = dist.get_world_size(group)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial, group=self._group)
        return partial

    def all_gather(self, shard: torch.Tensor, dim: int) -> torch.Tensor:
        shards = [torch.empty_like(shard) for _ in range(self._size)]
        dist.all_gather(shards, shard.contiguous(), group=self._group)
        return torch.cat(shards, dim=dim)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The two groups a rank adds up in: `tp` shares heads and MLP rows, `ep` shares the experts."""

    tp: Communicator = field(default_factory=SingleRank)
    ep: Communicator = field(default_factory=SingleRank)
