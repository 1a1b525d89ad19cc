"""Owns what goes into and comes out of the eviction policy, in plain data."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class EvictionReason(StrEnum):
    """Why an object was given up."""

    BUDGET = "budget"
    ORPHAN_KV = "orphan_kv"
    ORPHAN_STATE = "orphan_state"
    PATH_CAP = "path_cap"
    LOST_GROUP = "lost_group"


@dataclass(frozen=True, slots=True)
class Evicted:
    """An object to delete: a checkpoint with all its head groups, or a KV segment."""

    kind: Literal["ck", "kv"]
    key: bytes
    position: int | None
    reason: EvictionReason


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint in plain data.

    `segments` are the keys of the KV segments it needs, `boundaries` those of every boundary known on its path, the
    segments' included, both shallowest first; without `boundaries` the path is the segments. A shallower checkpoint is
    known to lie on the path when its key is among them. `hits` are as of `last_use_s`; `ms_per_token` is what it takes
    to compute what the checkpoint saves.
    """

    key: bytes
    position: int
    num_bytes: int
    segments: tuple[bytes, ...] = ()
    boundaries: tuple[bytes, ...] = ()
    hits: float = 1.0
    last_use_s: float = 0.0
    kind: str = ""
    ms_per_token: float = 1.0

    @property
    def path(self) -> tuple[bytes, ...]:
        """The keys from the root to this checkpoint, its own included."""
        path = self.boundaries or self.segments
        return path if path and path[-1] == self.key else (*path, self.key)
