"""Owns what is kept and published of what sequences compute. Engine thread only; knows not what they start from."""

from collections.abc import Iterable

import torch

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS, ObjectKey
from warmstate.models.backend import ModelBackend, SequenceState
from warmstate.replicas.cache.host_tier import HostTier
from warmstate.replicas.cache.placement import Placement, kinds_on_path, surplus_checkpoints
from warmstate.replicas.cache.state_codec import (
    CheckpointNames,
    Parts,
    as_part,
    encode_checkpoint,
    floor_to_segment,
    state_bytes,
)
from warmstate.replicas.cache.store_link import Publication, StoreLink
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.messages import CheckpointKind
from warmstate.replicas.sequence import Sequence

Objects = dict[ObjectKey, Parts]


class CheckpointKeeper:
    """Copies checkpoints to the host tier, and from there to the shared store in the background."""

    def __init__(
        self,
        backend: ModelBackend,
        host: HostTier,
        names: CheckpointNames,
        link: StoreLink | None,
        config: CacheConfig,
    ) -> None:
        self._backend = backend
        self._shapes = backend.shapes
        self._host = host
        self._names = names
        self._link = link
        self._config = config
        self._num_kept = dict.fromkeys(CheckpointKind, 0)

    def keep(self, sequence: Sequence, state: SequenceState, kind: CheckpointKind) -> bool:
        """Keeps and publishes a checkpoint of a committed step; False, and nothing, if it is not finite.

        The sequence still holds its blocks, so the bytes that are copied are the bytes that were computed.
        """
        placement = Placement(state.position, kind)
        room = self._host.reserve(sequence.prefix_keys, state.position, kind)
        if room is None and not self._would_publish(sequence, placement):
            return _all_finite(state.rec, state.conv)
        segments = self._copy_segments(sequence, floor_to_segment(state.position))
        checkpoint = self._copy_checkpoint(sequence, state)
        if segments is None or checkpoint is None:
            if room is not None:
                self._host.give_up(room)
            return False
        if room is not None:
            self._host.put(room, segments, checkpoint)
        self._num_kept[kind] += 1
        self._drop_surplus(sequence)
        if _is_for_all(sequence, placement):
            self._publish(sequence, placement, segments, checkpoint)
        return True

    def publish_on_second_sight(self, sequence: Sequence) -> None:
        """Publishes the safety positions that an earlier prompt left on the path of this one."""
        for placement in self._on_path(sequence, sequence.num_known_tokens):
            if placement.kind is CheckpointKind.SAFETY:
                self._publish_kept(sequence, placement)

    def _on_path(self, sequence: Sequence, num_tokens: int) -> tuple[Placement, ...]:
        """The local checkpoints of the first `num_tokens` tokens of a sequence, the shallowest first."""
        keys = sequence.prefix_keys[: num_tokens // BLOCK_TOKENS]
        return kinds_on_path(self._host.checkpoints_on_path(keys))

    def stats(self) -> dict[str, float]:
        """Checkpoints kept since the start, by kind."""
        return {f"checkpoints_kept_{kind}": float(count) for kind, count in self._num_kept.items()}

    def _drop_surplus(self, sequence: Sequence) -> None:
        """A conversation that grows must not fill the tier with its own past."""
        on_path = self._on_path(sequence, sequence.num_tokens)
        for placement in surplus_checkpoints(on_path, self._config.max_checkpoints_per_path):
            self._host.drop(sequence.prefix_keys[placement.position // BLOCK_TOKENS - 1])

    def _would_publish(self, sequence: Sequence, placement: Placement) -> bool:
        """Whether a checkpoint is worth copying for the shared store alone."""
        if self._link is None or not _is_for_all(sequence, placement):
            return False
        tail_start = floor_to_segment(placement.position)
        stops = range(SEGMENT_TOKENS, tail_start + 1, SEGMENT_TOKENS)
        num_lacking = sum(self._link.lacks(self._names.segment(sequence.prefix_keys, stop)) for stop in stops)
        num_tokens = placement.position - tail_start + SEGMENT_TOKENS * num_lacking
        return self._link.would_take(state_bytes(self._shapes, num_tokens))

    def _publish(self, sequence: Sequence, placement: Placement, segments: Objects, checkpoint: Objects) -> None:
        """Sends what the store lacks of a checkpoint."""
        if self._link is None:
            return
        lacking = [(key, parts) for key, parts in segments.items() if self._link.lacks(key)]
        path = tuple(sequence.prefix_keys[: placement.position // BLOCK_TOKENS])
        ttl_s = self._config.session_ttl_s if placement.kind is CheckpointKind.OUTPUT else None
        objects = (*lacking, *checkpoint.items())
        self._link.publish(Publication(path, objects, placement.kind, ttl_s, self._host.borrow))

    def _publish_kept(self, sequence: Sequence, placement: Placement) -> None:
        names = self._names.checkpoint(sequence.prefix_keys[placement.position // BLOCK_TOKENS - 1], placement.position)
        if self._link is None or not any(map(self._link.lacks, names)):
            return
        stops = range(SEGMENT_TOKENS, placement.position + 1, SEGMENT_TOKENS)
        segments = self._borrow(self._names.segment(sequence.prefix_keys, stop) for stop in stops)
        checkpoint = self._borrow(names)
        if segments is not None and checkpoint is not None:
            self._publish(sequence, placement, segments, checkpoint)

    def _borrow(self, keys: Iterable[ObjectKey]) -> Objects | None:
        """Objects of the host tier; None if one is not there."""
        found = {key: self._host.borrow(key) for key in keys}
        whole = {key: parts for key, parts in found.items() if parts is not None}
        return whole if len(whole) == len(found) else None

    def _copy_segments(self, sequence: Sequence, stop: int) -> Objects | None:
        """The whole segments below `stop`, copied unless the host tier has them; None if one is not finite."""
        segments: Objects = {}
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

    def _copy_checkpoint(self, sequence: Sequence, state: SequenceState) -> Objects | None:
        """The objects of the state and the KV tail; None if something is not finite."""
        tail_start = floor_to_segment(state.position)
        kv_tail = self._read_kv(sequence, tail_start, state.position) if tail_start < state.position else None
        if not _all_finite(state.rec, state.conv, kv_tail):
            return None
        prefix_key = sequence.prefix_keys[state.position // BLOCK_TOKENS - 1]
        groups = self._names.checkpoint(prefix_key, state.position)
        return dict(zip(groups, encode_checkpoint(self._shapes, state, kv_tail), strict=True))

    def _read_kv(self, sequence: Sequence, start: int, stop: int) -> torch.Tensor:
        kv = torch.empty(self._shapes.kv_shape(stop - start), dtype=self._shapes.dtype)
        self._backend.read_kv(sequence.block_table, start, stop, kv)
        return kv


def _is_for_all(sequence: Sequence, placement: Placement) -> bool:
    """What only one path is known to need is not worth everyone's memory."""
    return placement.kind is not CheckpointKind.SAFETY or placement.position <= sequence.num_known_tokens


def _all_finite(*tensors: torch.Tensor | None) -> bool:
    return all(tensor is None or _is_finite(tensor) for tensor in tensors)


def _is_finite(tensor: torch.Tensor) -> bool:
    # Summing costs less than a copy, looking at every element ten times as much; large finite terms may overflow a sum.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
