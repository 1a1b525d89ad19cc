"""Owns what a replica sends to the shared store for one checkpoint. Knows no store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmstate.cache_store.keys import BLOCK_TOKENS, ObjectKey
from warmstate.replicas.cache.state_codec import Parts


@dataclass(frozen=True, slots=True)
class Publication:
    """A checkpoint to publish: its objects in the order of writing, KV first, so that it is whole once it is seen.

    `path` holds the prefix key of every block boundary up to `position`; `kind` says why the position was chosen and
    `ttl_s` how long it is wanted, None leaving that to the store. The KV segments `lacking`, of `segment_bytes` each,
    are not held: `find` gives each when its turn comes, from any thread, and also what turns out to have been lost of
    the other KV, which should be in the store.
    """

    path: Sequence[bytes]
    objects: tuple[tuple[ObjectKey, Parts], ...]
    kind: str = ""
    ttl_s: int | None = None
    lacking: tuple[ObjectKey, ...] = ()
    segment_bytes: int = 0
    find: Callable[[ObjectKey], Parts | None] = lambda key: None

    @property
    def prefix_key(self) -> bytes:
        return self.path[-1]

    @property
    def position(self) -> int:
        return len(self.path) * BLOCK_TOKENS

    @property
    def num_bytes(self) -> int:
        """All that the store is thought to need."""
        return self._object_bytes + self.segment_bytes * len(self.lacking)

    @property
    def held_bytes(self) -> int:
        """What is held at one time until all is written: the objects, and a segment that was found."""
        return self._object_bytes + self.segment_bytes * bool(self.lacking)

    @property
    def segments(self) -> dict[ObjectKey, int]:
        """The KV segments to write, and the bytes of each."""
        own = {key: _num_bytes(parts) for key, parts in self.objects if key.kind == "kv"}
        return own | dict.fromkeys(self.lacking, self.segment_bytes)

    @property
    def _object_bytes(self) -> int:
        return sum(_num_bytes(parts) for _, parts in self.objects)


def _num_bytes(parts: Parts) -> int:
    return sum(part.spec.num_bytes for part in parts.values())
