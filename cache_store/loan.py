"""Owns the right to use a caller's buffers, which ends when the caller's call returns, whatever threads still do."""

from collections.abc import Callable
from threading import Lock

from warmstate.cache_store.errors import LoanEnded


class Loan:
    """The caller's buffers, lent until the call returns: a thread that comes back later finds the loan ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open = True

    @property
    def is_open(self) -> bool:
        return self._open

    def use(self, work: Callable[[memoryview], int], view: memoryview) -> int:
        """Does `work`, which must not wait, on a part of the buffers. Raises `LoanEnded` when they were taken back."""
        with self._lock:
            if not self._open:
                raise LoanEnded("the caller had taken its buffers back")
            return work(view)

    def close(self) -> None:
        """Ends the loan; returns once nobody touches the buffers."""
        with self._lock:
            self._open = False
