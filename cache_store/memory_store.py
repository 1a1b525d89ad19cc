"""Owns whole objects in this process's memory under a byte budget. Knows no server and no model. Thread-safe."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from warmstate.cache_store.byte_ledger import ByteLedger
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
    Ready,
    Stored,
)


@dataclass(frozen=True, slots=True)
class _Object:
    """Read-only copies of the parts; never changed once it is in the store."""

    parts: Mapping[str, Part]
    num_bytes: int


class MemoryStore:
    """A `CheckpointStore` whose bytes never pass the budget: copies in progress count, and so does what was removed
    while somebody still holds it.

    It evicts the object used least recently, or, with `evicts` false, refuses a put until its owner has made room.
    """

    def __init__(self, budget_bytes: int, *, evicts: bool = True) -> None:
        self._ledger = ByteLedger(budget_bytes)
        self._evicts = evicts
        self._lock = Lock()
        self._objects: OrderedDict[ObjectKey, _Object] = OrderedDict()
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
        num_bytes = _num_bytes(parts)
        with self._lock:
            refused = self._admit(key, num_bytes)
        if refused is not None:
            return refused
        copies = {name: Part(part.spec, _copy_of(part)) for name, part in parts.items()}
        return self._insert(key, _Object(copies, num_bytes))

    def give_now(self, key: ObjectKey, parts: Mapping[str, Part]) -> Stored | Exists | Dropped:
        """Keeps the parts without copying them: nobody may change them from now on. They are arrays of numpy."""
        num_bytes = _num_bytes(parts)
        with self._lock:
            refused = self._admit(key, num_bytes)
        kept = {name: Part(part.spec, part.data.toreadonly()) for name, part in parts.items()}
        return refused or self._insert(key, _Object(kept, num_bytes))

    def reserve(self, num_bytes: int) -> bool:
        """Takes bytes of the budget for what is about to be made, where they are free."""
        with self._lock:
            return self._ledger.take(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Gives back reserved bytes, just before the objects they were for are put."""
        with self._lock:
            self._ledger.give(num_bytes)

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
            self._remove(key)

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return self._ledger.free_bytes

    def stats(self) -> dict[str, float]:
        """Bytes and objects now; hits, misses, puts and evictions since the start."""
        with self._lock:
            now = {"objects": len(self._objects), **self._ledger.stats()}
            names = ("hits", "misses", "stored", "exists", "dropped", "evictions")
            return {**{name: float(self._counts[name]) for name in names}, **{k: float(v) for k, v in now.items()}}

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        return self.get_now(key, into)

    async def prepare(self, needed: Sequence[ObjectKey], num_bytes: int, ttl_s: int | None = None) -> Ready | Dropped:
        """Only tells what is lost: nothing here has a time to live, and what is put makes room itself."""
        with self._lock:
            if self._closed:
                return Dropped(DropReason.UNAVAILABLE, "the store is closed")
            return Ready(tuple(key for key in needed if key not in self._objects))

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
            for key in list(self._objects):
                self._remove(key)

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

    def _admit(self, key: ObjectKey, num_bytes: int) -> Exists | Dropped | None:
        """Makes room and counts the bytes before they are copied; a result where nothing is to be copied."""
        if self._closed:
            return self._refuse(DropReason.UNAVAILABLE, "the store is closed")
        if key in self._objects:
            self._objects.move_to_end(key)
            self._counts["exists"] += 1
            return Exists()
        if num_bytes > self._ledger.budget_bytes:
            return self._refuse(DropReason.TOO_LARGE, f"{num_bytes} of {self._ledger.budget_bytes} bytes")
        while not (fits := self._ledger.take(num_bytes)) and self._evicts and self._objects:
            self._remove(next(iter(self._objects)))
            self._counts["evictions"] += 1
        return None if fits else self._refuse(DropReason.NO_ROOM, "what is in use fills the budget")

    def _insert(self, key: ObjectKey, stored: _Object) -> Stored | Exists | Dropped:
        with self._lock:
            if self._closed or key in self._objects:
                self._ledger.give(stored.num_bytes)
                self._counts["exists"] += not self._closed
                return self._refuse(DropReason.UNAVAILABLE, "the store is closed") if self._closed else Exists()
            self._objects[key] = stored
            self._counts["stored"] += 1
            return Stored(stored.num_bytes)

    def _remove(self, key: ObjectKey) -> None:
        stored = self._objects.pop(key, None)
        if stored is not None:
            self._ledger.lend(part.data for part in stored.parts.values())

    def _refuse(self, reason: DropReason, detail: str) -> Dropped:
        self._counts["dropped"] += 1
        return Dropped(reason, detail)


def _num_bytes(parts: Mapping[str, Part]) -> int:
    return sum(part.spec.num_bytes for part in parts.values())


def _as_array(part: Part) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(flat_bytes(part), dtype=np.uint8)


def _copy_of(part: Part) -> memoryview:
    """A read-only copy; numpy lets other threads run while it copies, which `bytes()` does not."""
    copy = np.empty(part.spec.num_bytes, dtype=np.uint8)
    np.copyto(copy, _as_array(part))
    return copy.data.toreadonly()
