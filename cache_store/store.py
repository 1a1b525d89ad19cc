"""The seam between a replica and shared storage: named parts in, named parts out. Knows no model and no engine.

A checkpoint of a prefix of p tokens (p a multiple of 64) is one "ck" object per head group, plus the "kv" objects of
every whole segment below p. Its parts, in the canonical layout of DESIGN.md 4:

    rec      float32   [gdn layers, v heads of the group, dk, dv]
    conv     dtype     [gdn layers, channels of the group in the order q|k|v, kernel - 1]
    kv_tail  dtype     [attention layers, kv heads, 2, p % 256, head_dim]     (group 0 only; absent when p % 256 == 0)

A "kv" object has the one part `kv`, dtype, [attention layers, kv heads, 2, 256, head_dim]. Further parts may join.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from warmstate.cache_store.errors import LayoutError
from warmstate.cache_store.keys import ObjectKey

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "int64": 8}


@dataclass(frozen=True, slots=True)
class PartSpec:
    """What one part must look like: dtype name (torch's spelling) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Part:
    """A spec and its bytes, C-contiguous. The buffer is borrowed: it must stay unchanged until the call returns."""

    spec: PartSpec
    data: memoryview

    def __post_init__(self) -> None:
        if self.data.nbytes != self.spec.num_bytes or not self.data.c_contiguous:
            raise LayoutError(
                f"part {self.spec.name}: buffer of {self.data.nbytes} bytes given, {self.spec.dtype}"
                f"{list(self.spec.shape)} needs {self.spec.num_bytes} contiguous bytes"
            )


class MissReason(StrEnum):
    """Why a `get` gave nothing. Every reason leads to the same thing: recompute."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    LAYOUT = "layout"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    BREAKER_OPEN = "breaker_open"


class DropReason(StrEnum):
    """Why a `put` stored nothing."""

    TOO_LARGE = "too_large"
    NO_ROOM = "no_room"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    BREAKER_OPEN = "breaker_open"
    LOST_KV = "lost_kv"


@dataclass(frozen=True, slots=True)
class Hit:
    """All parts were found whole, verified, and written into the caller's buffers."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing usable. The buffers may hold partial data and must not be used. `part` is the one that was missing, short
    or bad, where that is known."""

    reason: MissReason
    detail: str = ""
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """The object is whole and visible to every reader."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Exists:
    """Another writer had published the same object; its copy stays."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nothing was stored, and nothing partial is visible."""

    reason: DropReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """A checkpoint may be put now; of what it needs beside its own objects the store does not hold those `lost`."""

    lost: tuple[ObjectKey, ...] = ()


class CheckpointStore(Protocol):
    """Content-addressed objects made of named parts. Never raises into the engine: failures are results, counted.

    Implementations: `memory_store.MemoryStore` (a replica's host tier, and the test double) and
    `redis_store.RedisStore` (shared).
    """

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        """Fills the writable buffers of `into`, which names every part expected. Sizes are checked before any copy."""
        ...

    async def prepare(self, needed: Sequence[ObjectKey], num_bytes: int, ttl_s: int | None = None) -> Ready | Dropped:
        """Comes before the objects of a checkpoint, `num_bytes` of them, are put.

        What it needs and others have put lives as long as it from now on, if it did not live longer already: `ttl_s` as
        in `put`. `Dropped` says that the whole would not fit, before any of it was sent.
        """
        ...

    async def put(
        self, key: ObjectKey, parts: Mapping[str, Part], ttl_s: int | None = None
    ) -> Stored | Exists | Dropped:
        """Publishes all parts atomically: a reader sees the whole object or none of it.

        `ttl_s` is how long the object is wanted unless it is put again; None leaves it to the store. Putting what is
        there never shortens its life.
        """
        ...

    async def delete(self, key: ObjectKey) -> None:
        """Forgets the object, e.g. after a reader found it corrupt. Deleting an absent object is no error."""
        ...

    async def close(self) -> None:
        """Releases connections and threads; later calls answer `UNAVAILABLE`."""
        ...
