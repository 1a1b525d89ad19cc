"""Owns one checkpoint on its way from the device to the host: its state at once, its KV when there is time."""

from collections.abc import Callable

import torch

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS, ObjectKey
from warmstate.models.backend import ModelBackend, SequenceState
from warmstate.replicas.cache.state_codec import (
    CheckpointNames,
    Parts,
    as_part,
    encode_checkpoint,
    floor_to_segment,
    new_segment,
)
from warmstate.replicas.sequence import Sequence

Objects = dict[ObjectKey, Parts]


class CheckpointCopy:
    """The objects of a checkpoint of a committed step: `groups` hold state and KV tail, `segments` the KV below.

    The state is copied here and now. What `find` gives of the segments is shared; the others come, and the tail has its
    contents, with `read_kv`, until when somebody must hold `blocks`: full ones, which nobody writes to again.
    """

    def __init__(
        self,
        backend: ModelBackend,
        names: CheckpointNames,
        sequence: Sequence,
        state: SequenceState,
        find: Callable[[ObjectKey], Parts | None],
    ) -> None:
        num_blocks = state.position // BLOCK_TOKENS
        self.path = tuple(sequence.prefix_keys[:num_blocks])
        self.position = state.position
        self.blocks = sequence.block_table[:num_blocks]
        self.own_blocks = self.blocks[sequence.num_shared_blocks :]
        self.is_finite = all_finite(state.rec, state.conv)
        self.is_read = False
        self._backend = backend
        self._tail = self._new_tail()
        groups = encode_checkpoint(backend.shapes, state, self._tail)
        self.groups: Objects = dict(zip(names.checkpoint(self.path[-1], state.position), groups, strict=True))
        stops = range(SEGMENT_TOKENS, state.position + 1, SEGMENT_TOKENS)
        found = {key: find(key) for key in (names.segment(self.path, stop) for stop in stops)}
        self.segments: Objects = {key: parts for key, parts in found.items() if parts is not None}
        self._missing = [key for key, parts in found.items() if parts is None]

    def read_kv(self) -> None:
        """Copies the KV, from any thread; stops, with `is_finite` false, where it holds a NaN or an infinity."""
        for key in self._missing:
            kv = new_segment(self._backend.shapes)
            if not self._read(key.position - SEGMENT_TOKENS, key.position, kv):
                return
            self.segments[key] = {"kv": as_part("kv", kv)}
        tail_start = floor_to_segment(self.position)
        self.is_read = self._tail is None or self._read(tail_start, self.position, self._tail)

    def _read(self, start: int, stop: int, kv: torch.Tensor) -> bool:
        self._backend.read_kv(self.blocks, start, stop, kv)
        self.is_finite = self.is_finite and all_finite(kv)
        return self.is_finite

    def _new_tail(self) -> torch.Tensor | None:
        num_tokens, shapes = self.position - floor_to_segment(self.position), self._backend.shapes
        return torch.empty(shapes.kv_shape(num_tokens), dtype=shapes.dtype) if num_tokens else None


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return all(map(_is_finite, tensors))


def _is_finite(tensor: torch.Tensor) -> bool:
    # Summing costs less than a copy, looking at every element ten times as much; large finite terms may overflow a sum.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
