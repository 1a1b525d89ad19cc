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
        self.is_finite = all_finite(self._state.rec, self._state.conv) and self._make_segments() and self._make_groups()
        self.is_made = self.is_finite

    def _make_segments(self) -> bool:
        for stop in range(SEGMENT_TOKENS, self._state.position + 1, SEGMENT_TOKENS):
            key = self._names.segment(self.path, stop)
            parts = self._find(key)
            if parts is None:
                kv = new_segment(self._backend.shapes)
                if not self._read(stop - SEGMENT_TOKENS, stop, kv):
                    return False
                parts = {"kv": as_part("kv", kv)}
            self.segments[key] = parts
        return True

    def _make_groups(self) -> bool:
        position, shapes = self._state.position, self._backend.shapes
        tail_start, tail = floor_to_segment(position), None
        if tail_start < position:
            tail = torch.empty(shapes.kv_shape(position - tail_start), dtype=shapes.dtype)
            if not self._read(tail_start, position, tail):
                return False
        groups = encode_checkpoint(shapes, self._state, tail)
        self.groups = dict(zip(self._names.checkpoint(self.path[-1], position), groups, strict=True))
        return True

    def _read(self, start: int, stop: int, kv: torch.Tensor) -> bool:
        """Copies KV; whether all of it is finite."""
        self._backend.read_kv(self.blocks, start, stop, kv)
        return all_finite(kv)


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return all(map(_is_finite, tensors))


def _is_finite(tensor: torch.Tensor) -> bool:
    # Summing costs less than a copy, looking at every element ten times as much; large finite terms may overflow a sum.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
