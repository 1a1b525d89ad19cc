"""Owns the search for objects that no row describes, such as a writer leaves that died before it told of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import redis

from warmstate.cache_store.names import ALL_OBJECTS, IndexNames, ObjectName, parse_object_name

GRACE_S = 60.0
"""A row is written after its object: only what had none for so long is an orphan."""

_SCAN_COUNT = 200
_MAX_SUSPECTS = 10_000


@dataclass(frozen=True, slots=True)
class _Suspect:
    since_s: float
    num_bytes: int


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
        self._suspects: dict[ObjectName, _Suspect] = {}

    @property
    def num_bytes(self) -> int:
        """Of the objects seen that had no row: in no count of rows, and on the server all the same."""
        return sum(suspect.num_bytes for suspect in self._suspects.values())

    def find(self) -> list[ObjectName]:
        """The objects that had no row a while ago and have none now."""
        now = self._clock()
        due = [name for name, suspect in self._suspects.items() if now - suspect.since_s >= self._grace_s]
        for name in due:
            del self._suspects[name]
        orphans = self._without_row(due)
        new = [name for name in self._without_row(self._next_names()) if name not in self._suspects]
        new = new[: _MAX_SUSPECTS - len(self._suspects)]
        for name, num_bytes in zip(new, self._sizes(new), strict=True):
            self._suspects[name] = _Suspect(now, num_bytes)
        return orphans

    def _sizes(self, names: list[ObjectName]) -> list[int]:
        pipeline = self._payload.pipeline(transaction=False)
        for name in names:
            pipeline.memory_usage(str(name))
        return [size or 0 for size in pipeline.execute()]

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
