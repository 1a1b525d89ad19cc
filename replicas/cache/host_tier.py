"""Owns the prefixes kept in this process's memory, and knows which of them are whole. Engine thread only.

A checkpoint is an object per head group; the KV below it is shared, segment by segment, with other checkpoints.
The listener is told what this tier can serve alone. A checkpoint some of whose KV lies only in device blocks is found
over them, and not announced, because blocks are reused without notice.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Keys
from dataclasses import dataclass

import torch

from warmstate.cache_store.eviction import EvictionPolicy, WholeListener
from warmstate.cache_store.eviction_rows import CheckpointRow, Evicted, EvictionReason
from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS, ObjectKey
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import Dropped, Hit
from warmstate.models.backend import StateShapes
from warmstate.replicas.cache.state_codec import (
    CheckpointBuffers,
    CheckpointNames,
    Parts,
    as_part,
    floor_to_segment,
    new_segment,
    state_bytes,
)
from warmstate.replicas.sequence import KvSpan

CheckpointListener = WholeListener
"""Told (prefix key, position, whether it is usable now) when a local checkpoint comes or goes."""

_BLOCKS_PER_SEGMENT = SEGMENT_TOKENS // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes kept free for a checkpoint that is about to be put, and for the segments `missing`, named by their ends."""

    prefix_key: bytes
    position: int
    missing: tuple[int, ...]
    num_bytes: int
    is_new: bool


class HostTier:
    """Checkpoints and KV segments under a byte budget; `EvictionPolicy` says what goes."""

    def __init__(
        self,
        shapes: StateShapes,
        names: CheckpointNames,
        budget_bytes: int,
        listener: CheckpointListener,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shapes = shapes
        self._names = names
        self.budget_bytes = budget_bytes
        self._store = MemoryStore(budget_bytes, evicts=False)
        self._policy = EvictionPolicy(listener=listener)
        self._now_s = now_s
        self._segment_bytes = state_bytes(shapes, SEGMENT_TOKENS) - state_bytes(shapes, 0)
        self._evictions = Counter(dict.fromkeys(EvictionReason, 0))
        self._segments: dict[bytes, ObjectKey] = {}
        self._num_refused = 0

    def find(self, keys: Keys[bytes], num_resident_blocks: int) -> int:
        """The deepest position among boundaries `keys` with a whole checkpoint and all its KV here or resident.

        A checkpoint on the way whose KV is neither is dead weight, and is dropped.
        """
        for index in range(len(keys) - 1, -1, -1):
            checkpoint = self._policy.find(keys[index])
            if checkpoint is None:
                continue
            if checkpoint.is_whole or not self.missing_segments(keys, num_resident_blocks, checkpoint.position):
                return checkpoint.position
            self._delete(self._policy.drop(keys[index], EvictionReason.ORPHAN_STATE))
        return 0

    def missing_segments(self, keys: Keys[bytes], num_resident_blocks: int, position: int) -> list[int]:
        """The ends of the whole segments up to `position` that are neither resident nor here."""
        resident_tokens = num_resident_blocks * BLOCK_TOKENS
        stops = range(floor_to_segment(resident_tokens) + SEGMENT_TOKENS, position + 1, SEGMENT_TOKENS)
        return [stop for stop in stops if not self._store.contains(self._names.segment(keys, stop))]

    def read_checkpoint(self, prefix_key: bytes, position: int) -> CheckpointBuffers | None:
        """The checkpoint's state and KV tail; None, and never found again, when a part is gone."""
        if self._policy.find(prefix_key) is None:
            return None
        buffers = CheckpointBuffers(self._shapes, position)
        for group, key in enumerate(self._names.checkpoint(prefix_key, position)):
            if not isinstance(self._store.get_now(key, buffers.parts(group)), Hit):
                self._delete(self._policy.drop(prefix_key, EvictionReason.LOST_GROUP))
                return None
        self._policy.touch(prefix_key, self._now_s())
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
                    self._lose_segment(key)
                    return None
            spans.append(KvSpan(stop - SEGMENT_TOKENS, stop, kv))
        return spans

    def borrow(self, key: ObjectKey) -> Parts | None:
        """Read-only parts of an object, valid even after it is evicted; None when it is not here."""
        return self._store.borrow(key)

    def reserve(self, keys: Keys[bytes], position: int, kind: str = "") -> Room | None:
        """Makes room for a checkpoint at `position`, the last of boundaries `keys`, before anything of it is copied.

        What its path has here stays until `put` or `give_up`. None where the budget is too small for it, or somebody
        has reserved room for the same checkpoint and is about to put it.
        """
        row = self._row(keys, position, kind)
        if self._policy.is_reserved(row.key):
            return None
        is_new = self._policy.find(row.key) is None
        missing = tuple(self.missing_segments(keys, 0, position))
        num_bytes = len(missing) * self._segment_bytes + (row.num_bytes if is_new else 0)
        room = Room(row.key, position, missing, num_bytes, is_new)
        whole_path_bytes = row.num_bytes + len(row.segments) * self._segment_bytes
        if whole_path_bytes + self._store.stats()["lent_bytes"] > self.budget_bytes:
            self._num_refused += 1
            return None
        if num_bytes == 0:
            return room
        self._policy.reserve(row)
        if self._take(num_bytes):
            return room
        self._num_refused += 1
        self._release_path(room)
        return None

    def put(self, room: Room, segments: Mapping[ObjectKey, Parts], groups: Mapping[ObjectKey, Parts]) -> None:
        """Keeps a checkpoint and those of its `segments` that are missing here.

        The parts are given away, not copied: nobody may change them from now on.
        """
        if room.num_bytes == 0:
            return
        self._store.release(room.num_bytes)
        missing = [(key, parts) for key, parts in segments.items() if key.position in room.missing]
        for key, parts in (*missing, *groups.items()):
            outcome = self._store.give_now(key, parts)
            assert not isinstance(outcome, Dropped), "the room was reserved"
        self._segments.update((key.prefix, key) for key, _ in missing)
        self._policy.put_segments([key.prefix for key, _ in missing], self._segment_bytes)
        self._policy.commit(room.prefix_key)

    def give_up(self, room: Room) -> None:
        """Frees the room of a checkpoint that does not come."""
        if room.num_bytes:
            self._store.release(room.num_bytes)
            self._release_path(room)

    def checkpoints_on_path(self, keys: Keys[bytes]) -> list[tuple[int, str]]:
        """(position, kind) of every checkpoint at the boundaries `keys`, the shallowest first."""
        found = (self._policy.find(key) for key in keys)
        return [(checkpoint.position, checkpoint.kind) for checkpoint in found if checkpoint is not None]

    def drop(self, prefix_key: bytes) -> None:
        """Gives up a checkpoint that its path has too many of; one that is not here is no error."""
        if self._policy.find(prefix_key) is not None:
            self._delete(self._policy.drop(prefix_key, EvictionReason.PATH_CAP))

    def stats(self) -> dict[str, float]:
        """What is here now, and what was given up since the start, by reason."""
        store = self._store.stats()
        return {
            **{name: store[name] for name in ("bytes", "budget_bytes", "lent_bytes", "objects", "hits", "misses")},
            "checkpoints": float(self._policy.num_checkpoints),
            "checkpoints_whole": float(self._policy.num_whole),
            "refused": float(self._num_refused),
            **{f"evictions_{reason}": float(count) for reason, count in self._evictions.items()},
        }

    def _row(self, keys: Keys[bytes], position: int, kind: str) -> CheckpointRow:
        path = tuple(keys[: position // BLOCK_TOKENS])
        tail_tokens = position - floor_to_segment(position)
        return CheckpointRow(
            path[-1],
            position,
            state_bytes(self._shapes, tail_tokens),
            path[_BLOCKS_PER_SEGMENT - 1 :: _BLOCKS_PER_SEGMENT],
            path,
            last_use_s=self._now_s(),
            kind=kind,
        )

    def _take(self, num_bytes: int) -> bool:
        """Evicts until there is room; what others still hold of the evicted gives none yet."""
        while not self._store.reserve(num_bytes):
            shortfall = num_bytes - self._store.free_bytes
            evicted = self._policy.evict(self._policy.num_bytes - shortfall)
            if not evicted:
                return False
            self._delete(evicted)
        return True

    def _release_path(self, room: Room) -> None:
        if room.is_new:
            self._remove(self._policy.drop(room.prefix_key, EvictionReason.ORPHAN_STATE))
        else:
            self._policy.commit(room.prefix_key)

    def _lose_segment(self, key: ObjectKey) -> None:
        """A segment cannot be read: the checkpoints that need it are broken from now on. One that was evicted, or was
        never here, is lost to nobody."""
        if self._segments.pop(key.prefix, None) is None:
            return
        self._evictions[EvictionReason.LOST_GROUP] += 1
        self._store.delete_now(key)
        self._policy.lose_segment(key.prefix)

    def _delete(self, evicted: list[Evicted]) -> None:
        self._evictions.update(each.reason for each in evicted)
        self._remove(evicted)

    def _remove(self, evicted: list[Evicted]) -> None:
        for each in evicted:
            for key in self._objects_of(each):
                self._store.delete_now(key)

    def _objects_of(self, evicted: Evicted) -> tuple[ObjectKey, ...]:
        if evicted.position is None:
            return (self._segments.pop(evicted.key),)
        return self._names.checkpoint(evicted.key, evicted.position)
