"""Owns one checkpoint on its way from the device to the host, copied when there is time. Knows no thread."""

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
    """The objects of a checkpoint of a committed step, once `make` has run: `groups` hold state and KV tail, `segments`
    the KV below. Until then somebody must hold `blocks`: full ones, which nobody writes to again.
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
        self.blocks = sequence.block_table[:num_blocks]
        self.own_blocks = self.blocks[sequence.num_shared_blocks :]
        self.segments: Objects = {}
        self.groups: Objects = {}
        self.is_made = False
        self.is_finite = True
        self._backend = backend
        self._names = names
        self._state = state
        self._find = find

    def make(self) -> None:
        """Copies everything, from any thread; stops, with `is_finite` false, where there is a NaN or an infinity.

        The segments that `find` gives are shared, not copied.
        """
        state, shapes = self._state, self._backend.shapes
        self.is_finite = all_finite(state.rec, state.conv)
        for stop in range(SEGMENT_TOKENS, state.position + 1, SEGMENT_TOKENS):
            key = self._names.segment(self.path, stop)
            parts = self._find(key)
            if parts is None:
                kv = new_segment(shapes)
                self._read(stop - SEGMENT_TOKENS, stop, kv)
                parts = {"kv": as_part("kv", kv)}
            self.segments[key] = parts
            if not self.is_finite:
                return
        tail_start, tail = floor_to_segment(state.position), None
        if tail_start < state.position:
            tail = torch.empty(shapes.kv_shape(state.position - tail_start), dtype=shapes.dtype)
            self._read(tail_start, state.position, tail)
        groups = encode_checkpoint(shapes, state, tail)
        self.groups = dict(zip(self._names.checkpoint(self.path[-1], state.position), groups, strict=True))
        self.is_made = self.is_finite

    def _read(self, start: int, stop: int, kv: torch.Tensor) -> None:
        self._backend.read_kv(self.blocks, start, stop, kv)
        self.is_finite = self.is_finite and all_finite(kv)


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return all(map(_is_finite, tensors))


def _is_finite(tensor: torch.Tensor) -> bool:
    # Summing costs less than a copy, looking at every element ten times as much; large finite terms may overflow a sum.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
