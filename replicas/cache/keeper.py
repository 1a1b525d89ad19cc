"""Owns what is kept and published of what sequences compute. Engine thread only; knows not what they start from."""

import torch

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS, ObjectKey
from warmstate.models.backend import ModelBackend, SequenceState
from warmstate.replicas.cache.host_tier import HostTier
from warmstate.replicas.cache.state_codec import (
    CheckpointNames,
    Parts,
    as_part,
    encode_checkpoint,
    floor_to_segment,
)
from warmstate.replicas.cache.store_link import Publication, StoreLink
from warmstate.replicas.sequence import Sequence


class CheckpointKeeper:
    """Copies checkpoints to the host tier, and from there to the shared store in the background."""

    def __init__(self, backend: ModelBackend, host: HostTier, names: CheckpointNames, link: StoreLink | None) -> None:
        self._backend = backend
        self._shapes = backend.shapes
        self._host = host
        self._names = names
        self._link = link
        self.num_kept = 0

    def keep(self, sequence: Sequence, state: SequenceState, prefix_key: bytes) -> bool:
        """Keeps and publishes a checkpoint of a committed step; False, and nothing, if it is not finite.

        The sequence still holds its blocks, so the bytes that are copied are the bytes that were computed.
        """
        room = self._host.reserve(sequence.prefix_keys, state.position)
        segments = self._copy_segments(sequence, floor_to_segment(state.position))
        checkpoint = self._copy_checkpoint(sequence, state, prefix_key)
        if segments is None or checkpoint is None:
            if room is not None:
                self._host.give_up(room)
            return False
        if room is not None:
            self._host.put(room, segments, checkpoint)
        self.num_kept += 1
        if self._link is not None:
            lacking = [(key, parts) for key, parts in segments.items() if self._link.lacks(key)]
            path = tuple(sequence.prefix_keys[: state.position // BLOCK_TOKENS])
            self._link.publish(Publication(path, (*lacking, *checkpoint.items())))
        return True

    def _copy_segments(self, sequence: Sequence, stop: int) -> dict[ObjectKey, Parts] | None:
        """The whole segments below `stop`, copied unless the host tier has them; None if one is not finite."""
        segments: dict[ObjectKey, Parts] = {}
        for end in range(SEGMENT_TOKENS, stop + 1, SEGMENT_TOKENS):
            key = self._names.segment(sequence.prefix_keys, end)
            parts = self._host.borrow(key)
            if parts is None:
                kv = self._read_kv(sequence, end - SEGMENT_TOKENS, end)
                if not _all_finite(kv):
                    return None
                parts = {"kv": as_part("kv", kv)}
            segments[key] = parts
        return segments

    def _copy_checkpoint(
        self, sequence: Sequence, state: SequenceState, prefix_key: bytes
    ) -> dict[ObjectKey, Parts] | None:
        """The objects of the state and the KV tail; None if something is not finite."""
        tail_start = floor_to_segment(state.position)
        kv_tail = self._read_kv(sequence, tail_start, state.position) if tail_start < state.position else None
        if not _all_finite(state.rec, state.conv, kv_tail):
            return None
        groups = self._names.checkpoint(prefix_key, state.position)
        return dict(zip(groups, encode_checkpoint(self._shapes, state, kv_tail), strict=True))

    def _read_kv(self, sequence: Sequence, start: int, stop: int) -> torch.Tensor:
        kv = torch.empty(self._shapes.kv_shape(stop - start), dtype=self._shapes.dtype)
        self._backend.read_kv(sequence.block_table, start, stop, kv)
        return kv


def _all_finite(*tensors: torch.Tensor | None) -> bool:
    return all(tensor is None or _is_finite(tensor) for tensor in tensors)


def _is_finite(tensor: torch.Tensor) -> bool:
    # Summing costs less than a copy, looking at every element ten times as much; large finite terms may overflow a sum.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
