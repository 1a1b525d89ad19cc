"""Owns the host tier: whole objects in this process's memory under a byte budget. Knows no server and no model.

Thread-safe: the engine thread calls `get_now` and `put_now`, I/O threads may `borrow` at the same moment.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np

from warmstate.cache_store.codec import flat_bytes
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.store import (
    Dropped,
    DropReason,
    Exists,
    Hit,
    Miss,
    MissReason,
    Part,
    PartSpec,
    Stored,
)


@dataclass(frozen=True, slots=True)
class _Object:
    """Read-only copies of the parts; never changed once it is in the store."""

    parts: Mapping[str, Part]
    num_bytes: int


class MemoryStore:
    """A `CheckpointStore` that evicts the object used least recently. Its bytes never pass the budget, copies in
    progress included; `on_evict` is told, on the putting thread and outside the lock, what was evicted."""

    def __init__(self, budget_bytes: int, on_evict: Callable[[ObjectKey], None] | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._on_evict = on_evict
        self._lock = Lock()
        self._objects: OrderedDict[ObjectKey, _Object] = OrderedDict()
        self._num_bytes = 0
        self._closed = False
        self._counts: Counter[str] = Counter()

    def get_now(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        """Copies the object into the writable buffers of `into`, which names every part expected."""
        found = self._find(key, {name: part.spec for name, part in into.items()})
        if isinstance(found, Miss):
            return found
        for name, part in into.items():
            np.copyto(_as_array(part), _as_array(found.parts[name]))
        return Hit(found.num_bytes)

    def put_now(self, key: ObjectKey, parts: Mapping[str, Part]) -> Stored | Exists | Dropped:
        """Copies the parts; objects used least recently make room first."""
        num_bytes = sum(part.spec.num_bytes for part in parts.values())
        refused, evicted = self._reserve(key, num_bytes)
        self._tell_evicted(evicted)
        if refused is not None:
            return refused
        copies = {name: Part(part.spec, _copy_of(part)) for name, part in parts.items()}
        return self._insert(key, _Object(copies, num_bytes))

    def borrow(self, key: ObjectKey) -> Mapping[str, Part] | None:
        """Read-only views of the stored parts, not copied; they stay valid after an eviction. None when absent."""
        with self._lock:
            stored = self._objects.get(key)
            return None if stored is None else stored.parts

    def contains(self, key: ObjectKey) -> bool:
        """Whether the object is here; asking does not refresh it."""
        with self._lock:
            return key in self._objects

    def delete_now(self, key: ObjectKey) -> None:
        with self._lock:
            stored = self._objects.pop(key, None)
            self._num_bytes -= stored.num_bytes if stored else 0

    def stats(self) -> dict[str, float]:
        """Bytes and objects now; hits, misses, puts and evictions since the start."""
        with self._lock:
            now = {"bytes": self._num_bytes, "objects": len(self._objects), "budget_bytes": self._budget_bytes}
            names = ("hits", "misses", "stored", "exists", "dropped", "evictions")
            return {**{name: float(self._counts[name]) for name in names}, **{k: float(v) for k, v in now.items()}}

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        return self.get_now(key, into)

    async def put(
        self, key: ObjectKey, parts: Mapping[str, Part], ttl_s: int | None = None
    ) -> Stored | Exists | Dropped:
        """`ttl_s` changes nothing here: the budget decides what goes."""
        return self.put_now(key, parts)

    async def delete(self, key: ObjectKey) -> None:
        self.delete_now(key)

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            self._objects.clear()
            self._num_bytes = 0

    def _find(self, key: ObjectKey, expected: Mapping[str, PartSpec]) -> _Object | Miss:
        with self._lock:
            stored = self._objects.get(key)
            miss = self._why_not(stored, expected)
            self._counts["misses" if miss else "hits"] += 1
            if stored is None or miss is not None:
                return miss or Miss(MissReason.ABSENT)
            self._objects.move_to_end(key)
            return stored

    def _why_not(self, stored: _Object | None, expected: Mapping[str, PartSpec]) -> Miss | None:
        if self._closed:
            return Miss(MissReason.UNAVAILABLE, "the store is closed")
        if stored is None:
            return Miss(MissReason.ABSENT)
        specs = {name: part.spec for name, part in stored.parts.items()}
        return None if specs == expected else Miss(MissReason.LAYOUT, f"holds {specs}, expected {dict(expected)}")

    def _reserve(self, key: ObjectKey, num_bytes: int) -> tuple[Exists | Dropped | None, list[ObjectKey]]:
        """Makes room and counts the bytes before they are copied. Returns a refusal, and what was evicted."""
        evicted: list[ObjectKey] = []
        with self._lock:
            if self._closed:
                return self._refuse(DropReason.UNAVAILABLE, "the store is closed"), evicted
            if key in self._objects:
                self._objects.move_to_end(key)
                self._counts["exists"] += 1
                return Exists(), evicted
            if num_bytes > self._budget_bytes:
                return self._refuse(DropReason.TOO_LARGE, f"{num_bytes} of {self._budget_bytes} bytes"), evicted
            while self._objects and self._num_bytes + num_bytes > self._budget_bytes:
                oldest, stored = self._objects.popitem(last=False)
                self._num_bytes -= stored.num_bytes
                self._counts["evictions"] += 1
                evicted.append(oldest)
            if self._num_bytes + num_bytes > self._budget_bytes:
                return self._refuse(DropReason.NO_ROOM, "other puts in progress fill the budget"), evicted
            self._num_bytes += num_bytes
        return None, evicted

    def _insert(self, key: ObjectKey, stored: _Object) -> Stored | Exists | Dropped:
        with self._lock:
            if self._closed:
                return self._refuse(DropReason.UNAVAILABLE, "the store is closed")
            if key in self._objects:
                self._num_bytes -= stored.num_bytes
                self._counts["exists"] += 1
                return Exists()
            self._objects[key] = stored
            self._counts["stored"] += 1
            return Stored(stored.num_bytes)

    def _refuse(self, reason: DropReason, detail: str) -> Dropped:
        self._counts["dropped"] += 1
        return Dropped(reason, detail)

    def _tell_evicted(self, evicted: list[ObjectKey]) -> None:
        for key in evicted:
            if self._on_evict is not None:
                self._on_evict(key)


def _as_array(part: Part) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(flat_bytes(part), dtype=np.uint8)


def _copy_of(part: Part) -> memoryview:
    """A read-only copy; numpy lets other threads run while it copies, which `bytes()` does not."""
    copy = np.empty(part.spec.num_bytes, dtype=np.uint8)
    np.copyto(copy, _as_array(part))
    return copy.data.toreadonly()
