"""Owns the way between a sequence's state and the named parts of `cache_store.store`. Knows shapes, no engine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS, ObjectKey
from warmstate.cache_store.store import Part, PartSpec
from warmstate.models.backend import SequenceState, StateShapes

Parts = Mapping[str, Part]


def floor_to_segment(position: int) -> int:
    """The last segment boundary at or before `position`; the KV from there on is the checkpoint's tail."""
    return position // SEGMENT_TOKENS * SEGMENT_TOKENS


def dtype_name(dtype: torch.dtype) -> str:
    """The name `cache_store` knows a dtype by: torch's spelling without its package."""
    return str(dtype).removeprefix("torch.")


def state_bytes(shapes: StateShapes, num_tokens: int) -> int:
    """Bytes of one sequence's state with the KV of `num_tokens` tokens."""
    elements = math.prod(shapes.conv_shape()) + math.prod(shapes.kv_shape(num_tokens))
    return 4 * math.prod(shapes.rec_shape()) + shapes.dtype.itemsize * elements


def as_part(name: str, tensor: torch.Tensor) -> Part:
    """A part that shares the memory of a contiguous tensor on the host."""
    spec = PartSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
    return Part(spec, tensor.view(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """Names the objects of one replica's namespace."""

    namespace: bytes
    num_head_groups: int

    def checkpoint(self, prefix_key: bytes, position: int) -> tuple[ObjectKey, ...]:
        """The objects of a checkpoint, one per head group."""
        return tuple(
            ObjectKey("ck", self.namespace, prefix_key, position, group) for group in range(self.num_head_groups)
        )

    def segment(self, prefix_keys: Sequence[bytes], stop: int) -> ObjectKey:
        """The object of the KV segment that ends at `stop`; `prefix_keys` are those of every block from the start."""
        return ObjectKey("kv", self.namespace, prefix_keys[stop // BLOCK_TOKENS - 1], stop)


def encode_checkpoint(shapes: StateShapes, state: SequenceState, kv_tail: torch.Tensor | None) -> list[Parts]:
    """The parts of every head group, copied out of `state`; `kv_tail` belongs to group 0."""
    groups: list[Parts] = []
    for group in range(shapes.num_head_groups):
        rec = state.rec[:, shapes.group_v_heads(group)].contiguous()
        conv = torch.cat([state.conv[:, channels] for channels in shapes.group_channels(group)], dim=1)
        parts = {"rec": as_part("rec", rec), "conv": as_part("conv", conv.contiguous())}
        if group == 0 and kv_tail is not None:
            parts["kv_tail"] = as_part("kv_tail", kv_tail.contiguous())
        groups.append(parts)
    return groups


class CheckpointBuffers:
    """Writable parts for every head group of a checkpoint at `position`, and the state they hold once filled."""

    def __init__(self, shapes: StateShapes, position: int) -> None:
        self._shapes = shapes
        self._position = position
        tail_tokens = position - floor_to_segment(position)
        self._rec: list[torch.Tensor] = []
        self._conv: list[torch.Tensor] = []
        for group in range(shapes.num_head_groups):
            heads = shapes.group_v_heads(group)
            num_channels = sum(channels.stop - channels.start for channels in shapes.group_channels(group))
            self._rec.append(torch.empty(shapes.rec_shape(heads.stop - heads.start), dtype=torch.float32))
            self._conv.append(torch.empty(shapes.conv_shape(num_channels), dtype=shapes.dtype))
        self.kv_tail = torch.empty(shapes.kv_shape(tail_tokens), dtype=shapes.dtype) if tail_tokens else None

    def parts(self, group: int) -> Parts:
        """Where to read the parts of a head group into."""
        parts = {"rec": as_part("rec", self._rec[group]), "conv": as_part("conv", self._conv[group])}
        if group == 0 and self.kv_tail is not None:
            parts["kv_tail"] = as_part("kv_tail", self.kv_tail)
        return parts

    def state(self) -> SequenceState:
        """The state of all head groups put together; valid once every group was filled."""
        shapes = self._shapes
        conv = torch.empty(shapes.conv_shape(), dtype=shapes.dtype)
        for group, part in enumerate(self._conv):
            ranges = shapes.group_channels(group)
            for channels, share in zip(
                ranges, torch.split(part, [r.stop - r.start for r in ranges], dim=1), strict=True
            ):
                conv[:, channels] = share
        return SequenceState(self._position, torch.cat(self._rec, dim=1), conv)


def new_segment(shapes: StateShapes) -> torch.Tensor:
    """An empty KV segment."""
    return torch.empty(shapes.kv_shape(SEGMENT_TOKENS), dtype=shapes.dtype)
