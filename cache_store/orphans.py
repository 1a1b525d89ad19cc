"""Owns the search for objects that no row describes, such as a writer leaves that died before it told of them."""

import time
from collections.abc import Callable
from typing import cast

import redis

from warmstate.cache_store.names import ALL_OBJECTS, IndexNames, ObjectName, parse_object_name

GRACE_S = 60.0
"""A row is written after its object: only what had none for so long is an orphan."""

_SCAN_COUNT = 200
_MAX_SUSPECTS = 10_000


class OrphanSearch:
    """Looks at a few objects per call. Temporaries are left alone: they expire by themselves."""

    def __init__(
        self,
        index: redis.Redis,
        payload: redis.Redis,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._payload = payload
        self._grace_s = grace_s
        self._clock = clock
        self._cursor = 0
        self._suspects: dict[ObjectName, float] = {}

    def find(self) -> list[ObjectName]:
        """The objects that had no row a while ago and have none now."""
        now = self._clock()
        due = [name for name, since in self._suspects.items() if now - since >= self._grace_s]
        for name in due:
            del self._suspects[name]
        orphans = self._without_row(due)
        for name in self._without_row(self._next_names()):
            if len(self._suspects) < _MAX_SUSPECTS:
                self._suspects.setdefault(name, now)
        return orphans

    def _next_names(self) -> list[ObjectName]:
        reply = self._payload.scan(self._cursor, match=ALL_OBJECTS, count=_SCAN_COUNT)
        self._cursor, found = cast(tuple[int, list[bytes]], reply)
        names = [parse_object_name(name.decode("ascii", "replace")) for name in found]
        return [name for name in names if name is not None and name.kind != "tmp"]

    def _without_row(self, names: list[ObjectName]) -> list[ObjectName]:
        pipeline = self._index.pipeline(transaction=False)
        for name in names:
            index = IndexNames(name.short_namespace)
            pipeline.hexists(index.checkpoints if name.kind == "ck" else index.segments, name.prefix)
        return [name for name, has_row in zip(names, pipeline.execute(), strict=True) if not has_row]
