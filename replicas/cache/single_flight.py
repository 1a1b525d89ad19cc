"""Owns work that several callers want at once and that is done once. One event loop; knows nothing of the work."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    num_waiting: int = 0


class SingleFlight(Generic[T]):
    """The first caller of a key starts the work; whoever comes before it ends waits for the same result.

    The work is cancelled when the last of them no longer waits.
    """

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[T]] = {}

    def is_running(self, key: Hashable) -> bool:
        return key in self._flights

    async def join(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the work of `key`; raises what it raises."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(start()))
            flight.task.add_done_callback(lambda task: self._ended(key, task))
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting and not flight.task.done():
                flight.task.cancel()
                self._ended(key, flight.task)

    def _ended(self, key: Hashable, task: asyncio.Task[T]) -> None:
        """Whoever comes after a cancellation starts anew, and that flight is not this one."""
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
