"""Owns what is kept and published of what sequences compute. Engine thread only; knows not what they start from."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS, ObjectKey
from warmstate.models.backend import ModelBackend, SequenceState
from warmstate.replicas.cache.checkpoint_copy import CheckpointCopy, Objects, all_finite
from warmstate.replicas.cache.copying import Copier, Post
from warmstate.replicas.cache.host_tier import HostTier, Room
from warmstate.replicas.cache.placement import Placement, kinds_on_path, surplus_checkpoints
from warmstate.replicas.cache.publication import Publication
from warmstate.replicas.cache.state_codec import CheckpointNames, Parts, floor_to_segment, state_bytes
from warmstate.replicas.cache.store_link import StoreLink
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.messages import CheckpointKind
from warmstate.replicas.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Keeping:
    """A checkpoint that is being copied, and where it goes: into `room`, or only to the store, which has taken
    `publish_bytes` of its bound for it."""

    sequence: Sequence
    placement: Placement
    copy: CheckpointCopy
    room: Room | None
    publish_bytes: int
    done: Callable[[], None]


class CheckpointKeeper:
    """Copies checkpoints to the host tier, and from there to the shared store in the background.

    No step waits for that: `copier` copies, and the blocks of the KV are held until then. What steps hand out as states
    are copies already.
    """

    def __init__(
        self,
        backend: ModelBackend,
        blocks: BlockPool,
        host: HostTier,
        names: CheckpointNames,
        link: StoreLink | None,
        config: CacheConfig,
        copier: Copier,
        post: Post,
    ) -> None:
        self._backend = backend
        self._blocks = blocks
        self._shapes = backend.shapes
        self._host = host
        self._names = names
        self._link = link
        self._config = config
        self._copier = copier
        self._post = post
        self._in_progress: dict[bytes, _Keeping] = {}
        self._num_kept = dict.fromkeys(CheckpointKind, 0)

    def keep(
        self, sequence: Sequence, state: SequenceState, kind: CheckpointKind, done: Callable[[], None] = lambda: None
    ) -> bool:
        """Begins to keep and publish a checkpoint of a committed step; False, and nothing, if it is not finite.

        `done` is called once, when the checkpoint can be found or is known not to come. Where it turns out not to be
        finite only then, the sequence `is_broken` from then on.
        """
        keeping = self._begin(sequence, state, Placement(state.position, kind), done)
        if keeping is None:
            done()
            return all_finite(state.rec, state.conv)
        self._blocks.hold(keeping.copy.blocks)
        self._in_progress[keeping.copy.path[-1]] = keeping
        self._copier.run(keeping.copy.make, lambda: self._end(keeping), self._post)
        return keeping.copy.is_finite

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being copied."""
        return not self._in_progress

    def publish_on_second_sight(self, sequence: Sequence) -> None:
        """Publishes the safety positions that an earlier prompt left on the path of this one, and offers the checkpoint
        that it starts from here again, should the store not have taken it, or have lost it since."""
        start = sequence.num_cached_tokens if sequence.cache_source != "store" else None
        for placement in self._on_path(sequence, sequence.num_known_tokens):
            is_start = placement.position == start and placement.kind is not CheckpointKind.OUTPUT
            if is_start or placement.kind is CheckpointKind.SAFETY:
                self._publish_kept(sequence, placement)

    def stats(self) -> dict[str, float]:
        """Checkpoints kept since the start, by kind; those being copied now."""
        kept = {f"checkpoints_kept_{kind}": float(count) for kind, count in self._num_kept.items()}
        return {**kept, "checkpoints_in_copy": float(len(self._in_progress))}

    def _begin(
        self, sequence: Sequence, state: SequenceState, placement: Placement, done: Callable[[], None]
    ) -> _Keeping | None:
        """Finds room; None where nobody would take it, or it is on its way already."""
        if sequence.prefix_keys[state.position // BLOCK_TOKENS - 1] in self._in_progress:
            return None
        room = self._host.reserve(sequence.prefix_keys, state.position, placement.kind)
        publish_bytes = 0 if room is not None else self._take_publish_bytes(sequence, placement)
        if room is None and not publish_bytes:
            return None
        copy = CheckpointCopy(self._backend, self._names, sequence, state, self._host.borrow)
        return _Keeping(sequence, placement, copy, room, publish_bytes, done)

    def _end(self, keeping: _Keeping) -> None:
        """It has been copied, or could not be."""
        copy, sequence = keeping.copy, keeping.sequence
        del self._in_progress[copy.path[-1]]
        if copy.is_made:
            self._put(keeping)
        else:
            self._give_up(keeping)
        if not copy.is_finite:
            sequence.is_broken = True
            for block in copy.own_blocks:
                self._blocks.forget(block)
        self._blocks.release(copy.blocks)
        keeping.done()

    def _put(self, keeping: _Keeping) -> None:
        copy, sequence, placement = keeping.copy, keeping.sequence, keeping.placement
        if keeping.room is not None:
            self._host.put(keeping.room, copy.segments, copy.groups)
        self._num_kept[placement.kind] += 1
        self._drop_surplus(sequence)
        if self._link is None or not _is_for_all(sequence, placement):
            return
        if keeping.room is not None:
            self._publish(sequence, placement, copy.groups)
            return
        objects = (
            *((key, parts) for key, parts in copy.segments.items() if self._link.lacks(key)),
            *copy.groups.items(),
        )
        publication = Publication(copy.path, objects, placement.kind, self._ttl_s(placement))
        self._link.publish_taken(publication, keeping.publish_bytes)

    def _give_up(self, keeping: _Keeping) -> None:
        if keeping.room is not None:
            self._host.give_up(keeping.room)
        if self._link is not None and keeping.publish_bytes:
            self._link.give_back(keeping.publish_bytes)

    def _on_path(self, sequence: Sequence, num_tokens: int) -> tuple[Placement, ...]:
        """The local checkpoints of the first `num_tokens` tokens of a sequence, the shallowest first."""
        keys = sequence.prefix_keys[: num_tokens // BLOCK_TOKENS]
        return kinds_on_path(self._host.checkpoints_on_path(keys))

    def _drop_surplus(self, sequence: Sequence) -> None:
        """A conversation that grows must not fill the tier with its own past."""
        on_path = self._on_path(sequence, sequence.num_tokens)
        for placement in surplus_checkpoints(on_path, self._config.max_checkpoints_per_path):
            self._host.drop(sequence.prefix_keys[placement.position // BLOCK_TOKENS - 1])

    def _take_publish_bytes(self, sequence: Sequence, placement: Placement) -> int:
        """The bytes of a checkpoint that is worth copying for the shared store alone, taken of its bound; 0 if not."""
        if self._link is None or not _is_for_all(sequence, placement):
            return 0
        tail_start = floor_to_segment(placement.position)
        num_lacking = sum(map(self._link.lacks, self._segment_keys(sequence, tail_start)))
        num_tokens = placement.position - tail_start + SEGMENT_TOKENS * num_lacking
        num_bytes = state_bytes(self._shapes, num_tokens)
        return num_bytes if self._link.take(num_bytes) else 0

    def _publish(self, sequence: Sequence, placement: Placement, groups: Objects) -> None:
        """Sends a checkpoint, and of the KV below it what the store lacks, out of the host tier when its turn comes."""
        assert self._link is not None, "publishing needs a store"
        path = tuple(sequence.prefix_keys[: placement.position // BLOCK_TOKENS])
        lacking = tuple(filter(self._link.lacks, self._segment_keys(sequence, placement.position)))
        segment_bytes = state_bytes(self._shapes, SEGMENT_TOKENS) - state_bytes(self._shapes, 0)
        ttl_s = self._ttl_s(placement)
        self._link.publish(
            Publication(path, tuple(groups.items()), placement.kind, ttl_s, lacking, segment_bytes, self._host.borrow)
        )

    def _publish_kept(self, sequence: Sequence, placement: Placement) -> None:
        names = self._names.checkpoint(sequence.prefix_keys[placement.position // BLOCK_TOKENS - 1], placement.position)
        if self._link is None or not any(map(self._link.lacks, names)):
            return
        groups = self._borrow(names)
        if groups is not None:
            self._publish(sequence, placement, groups)

    def _segment_keys(self, sequence: Sequence, position: int) -> list[ObjectKey]:
        """The names of the whole KV segments up to `position`, the shallowest first."""
        stops = range(SEGMENT_TOKENS, position + 1, SEGMENT_TOKENS)
        return [self._names.segment(sequence.prefix_keys, stop) for stop in stops]

    def _ttl_s(self, placement: Placement) -> int | None:
        return self._config.session_ttl_s if placement.kind is CheckpointKind.OUTPUT else None

    def _borrow(self, keys: Iterable[ObjectKey]) -> Objects | None:
        """Objects of the host tier; None if one is not there."""
        found = {key: self._host.borrow(key) for key in keys}
        whole: dict[ObjectKey, Parts] = {key: parts for key, parts in found.items() if parts is not None}
        return whole if len(whole) == len(found) else None


def _is_for_all(sequence: Sequence, placement: Placement) -> bool:
    """What only one path is known to need is not worth everyone's memory."""
    return placement.kind is not CheckpointKind.SAFETY or placement.position <= sequence.num_known_tokens
