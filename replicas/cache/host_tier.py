"""Owns the prefixes kept in this process's memory, and knows which of them are whole. Engine thread only.

A checkpoint is an object per head group; the KV below it is shared, segment by segment, with other checkpoints.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Keys

import torch

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS, ObjectKey
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import Hit
from warmstate.models.backend import StateShapes
from warmstate.replicas.cache.state_codec import (
    CheckpointBuffers,
    CheckpointNames,
    Parts,
    as_part,
    floor_to_segment,
    new_segment,
)
from warmstate.replicas.sequence import KvSpan

CheckpointListener = Callable[[bytes, int, bool], None]
"""Told (prefix key, position, whether it is usable now) when a local checkpoint comes or goes."""


class HostTier:
    """Whole checkpoints and KV segments under a byte budget, the least recently used object going first."""

    def __init__(
        self, shapes: StateShapes, names: CheckpointNames, budget_bytes: int, listener: CheckpointListener
    ) -> None:
        self._shapes = shapes
        self._names = names
        self._store = MemoryStore(budget_bytes, on_evict=self._evicted)
        self._listener = listener
        self._checkpoints: set[bytes] = set()

    def find(self, keys: Keys[bytes], num_resident_blocks: int) -> int:
        """The deepest position among boundaries `keys` with a whole checkpoint and all its KV here or resident."""
        for index in range(len(keys) - 1, -1, -1):
            position = (index + 1) * BLOCK_TOKENS
            if keys[index] in self._checkpoints and not self.missing_segments(keys, num_resident_blocks, position):
                return position
        return 0

    def missing_segments(self, keys: Keys[bytes], num_resident_blocks: int, position: int) -> list[int]:
        """The ends of the whole segments up to `position` that are neither resident nor here."""
        resident_tokens = num_resident_blocks * BLOCK_TOKENS
        stops = range(floor_to_segment(resident_tokens) + SEGMENT_TOKENS, position + 1, SEGMENT_TOKENS)
        return [stop for stop in stops if not self._store.contains(self._names.segment(keys, stop))]

    def read_checkpoint(self, prefix_key: bytes, position: int) -> CheckpointBuffers | None:
        """The checkpoint's state and KV tail; None, and never found again, when a part is gone."""
        buffers = CheckpointBuffers(self._shapes, position)
        for group, key in enumerate(self._names.checkpoint(prefix_key, position)):
            if not isinstance(self._store.get_now(key, buffers.parts(group)), Hit):
                self._drop_checkpoint(prefix_key, position)
                return None
        return buffers

    def read_segments(self, keys: Keys[bytes], start: int, at_hand: Mapping[int, torch.Tensor]) -> list[KvSpan] | None:
        """The whole segments of the prefix of `keys` that reach beyond `start`, taking those `at_hand` by their end.

        None when a part is gone.
        """
        spans: list[KvSpan] = []
        for stop in range(floor_to_segment(start) + SEGMENT_TOKENS, len(keys) * BLOCK_TOKENS + 1, SEGMENT_TOKENS):
            kv = at_hand.get(stop)
            if kv is None:
                kv, key = new_segment(self._shapes), self._names.segment(keys, stop)
                if not isinstance(self._store.get_now(key, {"kv": as_part("kv", kv)}), Hit):
                    self._store.delete_now(key)
                    return None
            spans.append(KvSpan(stop - SEGMENT_TOKENS, stop, kv))
        return spans

    def borrow(self, key: ObjectKey) -> Parts | None:
        """Read-only parts of an object, valid even after it is evicted; None when it is not here."""
        return self._store.borrow(key)

    def put_segment(self, key: ObjectKey, parts: Parts) -> None:
        self._store.put_now(key, parts)

    def put_checkpoint(self, prefix_key: bytes, position: int, groups: Mapping[ObjectKey, Parts]) -> None:
        """Keeps a checkpoint whole, or not at all where the budget is too small for it."""
        for key, parts in groups.items():
            self._store.put_now(key, parts)
        if not all(self._store.contains(key) for key in groups):
            self._drop_checkpoint(prefix_key, position)
        elif prefix_key not in self._checkpoints:
            self._checkpoints.add(prefix_key)
            self._listener(prefix_key, position, True)

    def stats(self) -> dict[str, float]:
        return {**self._store.stats(), "checkpoints": float(len(self._checkpoints))}

    def _evicted(self, key: ObjectKey) -> None:
        """One head group gone makes the others dead weight."""
        if key.kind == "ck":
            self._drop_checkpoint(key.prefix, key.position)

    def _drop_checkpoint(self, prefix_key: bytes, position: int) -> None:
        for key in self._names.checkpoint(prefix_key, position):
            self._store.delete_now(key)
        if prefix_key in self._checkpoints:
            self._checkpoints.remove(prefix_key)
            self._listener(prefix_key, position, False)
