"""Owns what a tier gives up when it is full: GreedyDual over checkpoints, with the KV that only they need.

Pure bookkeeping, used by the host tier and by the store's lease holder. Knows no store; time and rates are passed in.

    value = L + hits x (position - parent's position) x ms_per_token / bytes

The parent is the next shallower checkpoint that survives on the same path: only the tokens beyond it are saved. `bytes`
are the checkpoint's own and those of the KV between the two. L is the value of what was evicted last, as it stood when
the checkpoint was last used, so that what nobody uses grows old (GreedyDual-Size, Cao and Irani 1997). The part of a
prefill that grows with the square of the length is left out.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from warmstate.cache_store.eviction_rows import CheckpointRow, Evicted, EvictionReason
from warmstate.cache_store.path_tree import PathCheckpoint, PathNode, PathTree, checkpoints_below

HALF_LIFE_S = 600.0
"""After this long without use, the hits a checkpoint has had count half."""


WholeListener = Callable[[bytes, int, bool], None]
"""Told (key, position, whether it is whole now) when a checkpoint and all its KV come to be here, or no longer are."""

_MAX_REVALUED = 64
"""Checkpoints that one call values anew: a prefix with ten thousand continuations must not hold up an engine's step."""

_HeapEntry = tuple[bool, float, float, bytes, int]


class EvictionPolicy:
    """What a tier holds, and in which order it goes: broken checkpoints first, then those of the least value.

    A segment never goes before a checkpoint that needs it; it goes together with the last one that does, the deepest
    segment first.
    """

    def __init__(
        self,
        half_life_s: float = HALF_LIFE_S,
        listener: WholeListener = lambda key, position, whole: None,
    ) -> None:
        self._half_life_s = half_life_s
        self._listener = listener
        self._tree = PathTree()
        self._checkpoints: dict[bytes, PathCheckpoint] = {}
        self._loose_kv: dict[bytes, int] = {}
        self._heap: list[_HeapEntry] = []
        self._to_revalue: dict[PathNode, None] = {}
        self._versions = itertools.count()
        self._clock = 0.0
        self.num_bytes = 0
        self.num_whole = 0

    @property
    def num_checkpoints(self) -> int:
        """Those here or reserved, whole or broken."""
        return len(self._checkpoints)

    def find(self, key: bytes) -> PathCheckpoint | None:
        """The checkpoint of `key`, whole or not; None when it is not here."""
        checkpoint = self._checkpoints.get(key)
        return checkpoint if checkpoint is not None and checkpoint.is_here else None

    def is_reserved(self, key: bytes) -> bool:
        """Whether the checkpoint of `key` is about to come, and not here yet."""
        checkpoint = self._checkpoints.get(key)
        return checkpoint is not None and not checkpoint.is_here

    def put_segment(self, key: bytes, num_bytes: int) -> None:
        """A KV segment has come; checkpoints that only lacked it are whole now."""
        self.put_segments((key,), num_bytes)

    def put_segments(self, keys: Sequence[bytes], num_bytes: int) -> None:
        """Segments of `num_bytes` each have come, all of one path, the shallowest first."""
        shallowest: PathNode | None = None
        for key in keys:
            node = self._tree.find(key)
            if node is None or not node.needs_kv:
                self.num_bytes += num_bytes - self._loose_kv.get(key, 0)
                self._loose_kv[key] = num_bytes
                continue
            self.num_bytes += num_bytes - (node.kv_bytes or 0)
            node.kv_bytes = num_bytes
            shallowest = shallowest or node
        if shallowest is not None:
            self._check_below(shallowest)

    def reserve(self, row: CheckpointRow) -> None:
        """Counts a checkpoint that is about to come; until `commit` or `drop` nothing of its path goes.

        One that is here already, broken, stays in its place for as long.
        """
        checkpoint = self._checkpoints.get(row.key)
        if checkpoint is None:
            self._add(row)
        else:
            checkpoint.is_here = False
            self._set_whole(checkpoint, whole=False)

    def commit(self, key: bytes) -> None:
        """A reserved checkpoint is here."""
        checkpoint = self._checkpoints[key]
        checkpoint.is_here = True
        self._check_whole(checkpoint)
        self._push(checkpoint)
        self._revalue_below(checkpoint.node)

    def put_checkpoint(self, row: CheckpointRow) -> None:
        """A checkpoint that is here."""
        self.reserve(row)
        self.commit(row.key)

    def put_checkpoints(self, rows: Iterable[CheckpointRow]) -> None:
        """Checkpoints that are all here, each valued once."""
        new = [self._add(row) for row in rows]
        for checkpoint in new:
            checkpoint.is_here = True
            self._check_whole(checkpoint)
        for checkpoint in new:
            self._push(checkpoint)

    def touch(self, key: bytes, now_s: float) -> None:
        """The checkpoint was consumed. Those above it were not, and are not refreshed."""
        checkpoint = self._checkpoints[key]
        checkpoint.hits = 1.0 + _decayed(checkpoint.hits, now_s - checkpoint.last_use_s, self._half_life_s)
        checkpoint.last_use_s = now_s
        checkpoint.base = self._clock
        self._push(checkpoint)
        self._revalue(_MAX_REVALUED)

    def drop(self, key: bytes, reason: EvictionReason) -> list[Evicted]:
        """Gives up a checkpoint, here or reserved, and the KV that nothing else needs."""
        checkpoint = self._checkpoints.pop(key)
        self._set_whole(checkpoint, whole=False)
        checkpoint.is_here, checkpoint.node.checkpoint = False, None
        self.num_bytes -= checkpoint.num_bytes
        self._revalue_below(checkpoint.node)
        return [Evicted("ck", key, checkpoint.position, reason), *self._drop_unneeded(checkpoint.node)]

    def lose_segment(self, key: bytes) -> None:
        """A segment is gone; the checkpoints that need it are broken."""
        node = self._tree.find(key)
        if node is None or node.kv_bytes is None:
            self.num_bytes -= self._loose_kv.pop(key, 0)
            return
        self.num_bytes -= node.kv_bytes
        node.kv_bytes = None
        self._check_below(node)

    def drop_orphans(self) -> list[Evicted]:
        """Gives up all KV that no checkpoint needs, and all checkpoints that lack some of their KV."""
        gone = self._drop_loose()
        for checkpoint in [c for c in self._checkpoints.values() if c.is_here and not c.is_whole]:
            gone += self.drop(checkpoint.key, EvictionReason.ORPHAN_STATE)
        return gone

    def evict(self, target_bytes: int) -> list[Evicted]:
        """Gives up what is worth least until no more than `target_bytes` are left, or only reserved paths."""
        gone: list[Evicted] = []
        if self.num_bytes > target_bytes:
            gone += self._drop_loose()
        while self.num_bytes > target_bytes and (checkpoint := self._pop()) is not None:
            if not checkpoint.is_whole:
                gone += self.drop(checkpoint.key, EvictionReason.ORPHAN_STATE)
                continue
            self._clock = max(self._clock, self.value(checkpoint))
            gone += self.drop(checkpoint.key, EvictionReason.BUDGET)
        return gone

    def revalue_all(self) -> None:
        """Values everything that waits for it, however much that is."""
        self._revalue()

    def value(self, checkpoint: PathCheckpoint) -> float:
        """Milliseconds saved per byte held, above the clock at the last use; see the head of this file."""
        num_bytes, parent_position = checkpoint.num_bytes, 0
        for node in checkpoint.node.lineage():
            above = node.checkpoint
            if above is not None and above is not checkpoint and above.is_here:
                parent_position = above.position
                break
            num_bytes += node.kv_bytes or 0
        saved_ms = (checkpoint.position - parent_position) * checkpoint.ms_per_token
        return checkpoint.base + checkpoint.hits * saved_ms / max(num_bytes, 1)

    def _add(self, row: CheckpointRow) -> PathCheckpoint:
        node = self._tree.grow(row.path, row.segments)
        checkpoint = PathCheckpoint(row.key, row.position, row.num_bytes, row.kind, node)
        checkpoint.hits, checkpoint.last_use_s, checkpoint.base = row.hits, row.last_use_s, self._clock
        checkpoint.ms_per_token = row.ms_per_token
        node.checkpoint = self._checkpoints[row.key] = checkpoint
        self.num_bytes += row.num_bytes
        for key in row.segments:
            segment = self._tree.find(key)
            if segment is not None and key in self._loose_kv:
                segment.kv_bytes = self._loose_kv.pop(key)
        return checkpoint

    def _check_below(self, node: PathNode) -> None:
        """Some KV at `node` came or went."""
        for checkpoint in checkpoints_below(node):
            self._check_whole(checkpoint)
            self._push(checkpoint)

    def _check_whole(self, checkpoint: PathCheckpoint) -> None:
        self._set_whole(checkpoint, whole=checkpoint.has_all_kv())

    def _set_whole(self, checkpoint: PathCheckpoint, *, whole: bool) -> None:
        if checkpoint.is_whole != whole:
            checkpoint.is_whole = whole
            self.num_whole += 1 if whole else -1
            self._listener(checkpoint.key, checkpoint.position, whole)

    def _drop_unneeded(self, start: PathNode) -> list[Evicted]:
        gone = [node for node in self._tree.prune(start) if node.kv_bytes is not None]
        self.num_bytes -= sum(node.kv_bytes or 0 for node in gone)
        return [Evicted("kv", node.key, None, EvictionReason.ORPHAN_KV) for node in gone]

    def _drop_loose(self) -> list[Evicted]:
        gone = [Evicted("kv", key, None, EvictionReason.ORPHAN_KV) for key in self._loose_kv]
        self.num_bytes -= sum(self._loose_kv.values())
        self._loose_kv.clear()
        return gone

    def _revalue_below(self, node: PathNode) -> None:
        """The checkpoint at `node` came or went, and with it the tokens that the next deeper ones save. Some of these
        are valued now, the others in later calls; until then they stand where they stood."""
        self._to_revalue.update(dict.fromkeys(node.children))
        self._revalue(_MAX_REVALUED)

    def _revalue(self, max_nodes: int | None = None) -> None:
        """Values at most so many of those that wait for it; None: all."""
        for _ in itertools.count() if max_nodes is None else range(max_nodes):
            if not self._to_revalue:
                return
            below, _ = self._to_revalue.popitem()
            if below.checkpoint is not None and below.checkpoint.is_here:
                self._push(below.checkpoint)
            else:
                self._to_revalue.update(dict.fromkeys(below.children))

    def _push(self, checkpoint: PathCheckpoint) -> None:
        """Puts a checkpoint where it now belongs; entries of older versions are skipped when they surface."""
        if not checkpoint.is_here:
            return
        checkpoint.version = next(self._versions)
        heapq.heappush(self._heap, self._entry(checkpoint))
        if len(self._heap) > 4 * len(self._checkpoints) + 64:
            self._heap = [entry for entry in self._heap if self._current(entry) is not None]
            heapq.heapify(self._heap)

    def _entry(self, checkpoint: PathCheckpoint) -> _HeapEntry:
        value = self.value(checkpoint)
        return checkpoint.is_whole, value, checkpoint.last_use_s, checkpoint.key, checkpoint.version

    def _current(self, entry: _HeapEntry) -> PathCheckpoint | None:
        """The checkpoint of an entry; None where a newer entry stands for it, or it is not here."""
        _, _, _, key, version = entry
        checkpoint = self.find(key)
        return checkpoint if checkpoint is not None and checkpoint.version == version else None

    def _pop(self) -> PathCheckpoint | None:
        while self._heap:
            checkpoint = self._current(heapq.heappop(self._heap))
            if checkpoint is not None:
                return checkpoint
        return None


def plan_evictions(
    checkpoints: Iterable[CheckpointRow],
    segments: Iterable[tuple[bytes, int]],
    target_bytes: int,
    now_s: float,
    half_life_s: float = HALF_LIFE_S,
) -> list[Evicted]:
    """What to delete of a tier that holds these: all orphans, then what is worth least until `target_bytes` are left.

    `segments` are (key, bytes). Hits count as they stand at `now_s`: no clock L has seen these rows grow old.
    """
    policy = EvictionPolicy(half_life_s=half_life_s)
    for key, num_bytes in segments:
        policy.put_segment(key, num_bytes)
    rows = [replace(row, hits=_decayed(row.hits, now_s - row.last_use_s, half_life_s)) for row in checkpoints]
    policy.put_checkpoints(rows)
    orphans = policy.drop_orphans()
    policy.revalue_all()
    return orphans + policy.evict(target_bytes)


def _decayed(hits: float, idle_s: float, half_life_s: float) -> float:
    return float(hits * 0.5 ** (max(idle_s, 0.0) / half_life_s))
