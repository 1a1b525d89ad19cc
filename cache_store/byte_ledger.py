"""Owns the count of a byte budget, down to memory that was given up and is still held by somebody. Knows no objects."""

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any


class ByteLedger:
    """Bytes taken of a budget. Its owner locks; only the return of lent memory comes from any thread by itself."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._num_bytes = 0
        self._lent_bytes = 0
        self._lent: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._returned: deque[int] = deque()

    @property
    def free_bytes(self) -> int:
        self._settle()
        return self.budget_bytes - self._num_bytes

    def take(self, num_bytes: int) -> bool:
        """Counts bytes that are about to be used; False, and nothing, where the budget has no room for them."""
        if num_bytes > self.free_bytes:
            return False
        self._num_bytes += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        """Bytes that are no longer used."""
        self._num_bytes -= num_bytes

    def lend(self, buffers: Iterable[memoryview]) -> None:
        """Buffers over arrays that their owner gives up: their bytes come back when nobody holds the arrays."""
        for data in buffers:
            # A callback may run in any thread and at any time, so it only leaves a note.
            reference: weakref.ref[Any] = weakref.ref(data.obj, self._note_return)
            self._lent[id(reference)] = reference, data.nbytes
            self._lent_bytes += data.nbytes

    def stats(self) -> dict[str, int]:
        """`bytes` includes `lent_bytes`, which are given up and still held by somebody."""
        self._settle()
        return {"bytes": self._num_bytes, "budget_bytes": self.budget_bytes, "lent_bytes": self._lent_bytes}

    def _note_return(self, reference: weakref.ref[Any]) -> None:
        self._returned.append(self._lent.pop(id(reference))[1])

    def _settle(self) -> None:
        while self._returned:
            num_bytes = self._returned.popleft()
            self._num_bytes -= num_bytes
            self._lent_bytes -= num_bytes
