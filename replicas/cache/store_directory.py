"""Owns what this replica tells others of its prefixes, and what it hears of the shared store's. Never waits for I/O."""

import time
from collections.abc import Sequence

from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import PrefixEvent
from warmstate.cache_store.index_rows import StoredCheckpoint, StoredSegment
from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS
from warmstate.cache_store.known_paths import KnownPaths
from warmstate.cache_store.prefix_index import STORE_HOLDER, IndexRow, PrefixIndex
from warmstate.replicas.cache.publication import Publication


class EventDirectory:
    """A `store_link.StoreDirectory` over an index and paths that an `EventFollower` keeps up to date. `epoch` is this
    replica's, `ttl_s` the store's own time to live."""

    def __init__(self, index: PrefixIndex, paths: KnownPaths, log: EventLog, epoch: int, ttl_s: int) -> None:
        self._index = index
        self._paths = paths
        self._log = log
        self._epoch = epoch
        self._ttl_s = ttl_s

    def find_positions(self, keys: Sequence[bytes]) -> list[int]:
        return self._index.positions(keys, STORE_HOLDER)

    def count_known(self, keys: Sequence[bytes]) -> int:
        return self._paths.count(keys)

    def put(self, publication: Publication) -> None:
        key, position = publication.prefix_key, publication.position
        row, segments = self._row(publication), self._segments(publication)
        self._index.insert(key, STORE_HOLDER, IndexRow(position, "store"))
        # The way to its parent was told with that.
        path = publication.path[row.parent_position // BLOCK_TOKENS :]
        self._log.append(PrefixEvent("add", key, position, "store"), row, segments, path)

    def count_hit(self, key: bytes) -> None:
        self._log.count_hit(key)

    def remove(self, key: bytes, position: int) -> None:
        """Tells only what somebody may believe: an unknown row needs no correction."""
        if self._index.find(key, STORE_HOLDER) is not None:
            self._index.remove(key, STORE_HOLDER)
            self._log.append(PrefixEvent("remove", key, position, "store"))

    def tell_lost_segment(self, key: bytes) -> None:
        self._log.tell_lost_segment(key)

    def tell_local(self, key: bytes, position: int, usable: bool) -> None:
        """Tells routers that this replica's own tiers can, or can no longer, serve a prefix."""
        self._log.append(PrefixEvent("add" if usable else "remove", key, position, "host"))

    def _row(self, publication: Publication) -> StoredCheckpoint:
        path = publication.path
        groups = [parts for key, parts in publication.objects if key.kind == "ck"]
        parent_position = max(self.find_positions(path[:-1]), default=0)
        return StoredCheckpoint(
            position=publication.position,
            num_groups=len(groups),
            num_bytes=sum(part.spec.num_bytes for parts in groups for part in parts.values()),
            parent_position=parent_position,
            parent_key=_key_at(path, parent_position),
            segment_key=_key_at(path, publication.position // SEGMENT_TOKENS * SEGMENT_TOKENS),
            created_ms=_now_ms(),
            ttl_s=self._ttl(publication),
            epoch=self._epoch,
            kind=publication.kind,
        )

    def _segments(self, publication: Publication) -> dict[bytes, StoredSegment]:
        """The rows of the segments that were put with the checkpoint; those it shares have rows already."""
        return {
            key.prefix: StoredSegment(
                position=key.position,
                num_bytes=num_bytes,
                parent_key=_key_at(publication.path, key.position - SEGMENT_TOKENS),
                created_ms=_now_ms(),
                ttl_s=self._ttl(publication),
                epoch=self._epoch,
            )
            for key, num_bytes in publication.segments.items()
        }

    def _ttl(self, publication: Publication) -> int:
        return self._ttl_s if publication.ttl_s is None else publication.ttl_s


def _key_at(path: Sequence[bytes], position: int) -> bytes | None:
    return path[position // BLOCK_TOKENS - 1] if position else None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
