"""Owns the shared tier: the `CheckpointStore` over a Redis-protocol server. Knows no model and no engine.

Blocking work runs on private threads with a connection each, two that read and one that writes: somebody waits for what
is read, and nobody for what is written. The event loop only waits. Whatever the server does, a call ends within the
operation timeout and the time that the slowest tolerated network needs for the bytes, as a result.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import redis

from warmstate.cache_store.breaker import Breaker
from warmstate.cache_store.connections import KeptConnections
from warmstate.cache_store.errors import StoreUnavailable
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.loan import Loan
from warmstate.cache_store.redis_client import Failure, StoreAddress, failure_of
from warmstate.cache_store.redis_objects import ObjectReader, ObjectWriter, prepare_objects, remove_object
from warmstate.cache_store.store import Dropped, DropReason, Exists, Hit, Miss, MissReason, Part, Ready, Stored

_NUM_READERS = 2
_NUM_WRITERS = 1

_Result = TypeVar("_Result")

_COUNTERS = (
    "hits",
    *(f"misses_{reason}" for reason in MissReason),
    "stored",
    "exists",
    *(f"dropped_{reason}" for reason in DropReason),
    "deletes",
    "deletes_failed",
    "read_bytes",
    "written_bytes",
)


class RedisStore:
    """Objects on a Redis-protocol server (>= 7.0), shared by all replicas.

    `epoch` tells one life of a writer from the next and is written into every manifest. `max_in_flight_bytes` bounds
    what puts may wait for or send at once; a put beyond it is dropped, not queued. So is one that would pass
    `budget_bytes`, of which all writers share the count (`room.py`); None: the server alone says when it is full.
    """

    def __init__(
        self,
        address: StoreAddress,
        *,
        ttl_s: int = 86_400,
        max_object_bytes: int = 256 << 20,
        max_in_flight_bytes: int = 512 << 20,
        epoch: int = 0,
        budget_bytes: int | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        self._address = address
        self._ttl_ms = ttl_s * 1000
        self._max_object_bytes = max_object_bytes
        self._max_in_flight_bytes = max_in_flight_bytes
        self._epoch = epoch
        self._budget_bytes = budget_bytes
        self._connections = KeptConnections(address, _NUM_READERS + _NUM_WRITERS)
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="warmstate-store-read")
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="warmstate-store-write")
        self._breaker = breaker or Breaker()
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"get_seconds": 0.0, "put_seconds": 0.0}
        self._in_flight_bytes = 0
        self._awaited_bytes = 0
        self._closed = False

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        started = time.monotonic()
        outcome = await self._get(key, into)
        self._seconds["get_seconds"] += time.monotonic() - started
        if isinstance(outcome, Hit):
            self._counts["hits"] += 1
            self._counts["read_bytes"] += outcome.num_bytes
        else:
            self._counts[f"misses_{outcome.reason}"] += 1
        return outcome

    async def prepare(self, needed: Sequence[ObjectKey], num_bytes: int, ttl_s: int | None = None) -> Ready | Dropped:
        if self._closed:
            return Dropped(DropReason.UNAVAILABLE, "the store is closed")
        if not needed and self._budget_bytes is None:
            return Ready()
        if not self._breaker.allows():
            return Dropped(DropReason.BREAKER_OPEN)
        loan, ttl_ms = Loan(), self._ttl_ms if ttl_s is None else ttl_s * 1000
        # What waits for the one writing thread is time that the server did not waste.
        timeout_s = self._address.timeout_s(self._in_flight_bytes)
        deadline = time.monotonic() + timeout_s
        try:
            least_room = num_bytes if self._budget_bytes is not None else None
            work = self._on(
                self._writers, prepare_objects, self._connections, needed, loan, deadline, ttl_ms, least_room
            )
            outcome = await self._within(timeout_s, work)
        finally:
            loan.close()
        return Dropped(outcome.drop_reason, outcome.detail) if isinstance(outcome, Failure) else outcome

    async def put(
        self, key: ObjectKey, parts: Mapping[str, Part], ttl_s: int | None = None
    ) -> Stored | Exists | Dropped:
        started = time.monotonic()
        outcome = await self._put(key, parts, self._ttl_ms if ttl_s is None else ttl_s * 1000)
        self._seconds["put_seconds"] += time.monotonic() - started
        if isinstance(outcome, Stored):
            self._counts["stored"] += 1
            self._counts["written_bytes"] += outcome.num_bytes
        else:
            self._counts["exists" if isinstance(outcome, Exists) else f"dropped_{outcome.reason}"] += 1
        return outcome

    async def delete(self, key: ObjectKey) -> None:
        """Best effort: a server that does not answer keeps the object until it expires."""
        if self._closed or not self._breaker.allows():
            return
        timeout_s = self._address.timeout_s(self._in_flight_bytes)
        deadline = time.monotonic() + timeout_s
        outcome = await self._within(
            timeout_s, self._on(self._writers, remove_object, self._connections, key, deadline)
        )
        self._counts["deletes_failed" if isinstance(outcome, Failure) else "deletes"] += 1

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            for threads in (self._readers, self._writers):
                threads.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(self._connections.close)

    def stats(self) -> dict[str, float]:
        """Counters since the start by outcome, bytes, seconds spent, and the state of breaker and queue now."""
        now = {
            "in_flight_bytes": self._in_flight_bytes,
            "breaker_open": int(self._breaker.is_open),
            "breaker_opened": self._breaker.times_opened,
            "connections_opened": self._connections.num_opened,
        }
        counts = {name: self._counts[name] for name in _COUNTERS}
        return {name: float(value) for name, value in {**counts, **self._seconds, **now}.items()}

    async def _get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        if self._closed:
            return Miss(MissReason.UNAVAILABLE, "the store is closed")
        if not self._breaker.allows():
            return Miss(MissReason.BREAKER_OPEN)
        num_bytes = sum(part.spec.num_bytes for part in into.values())
        loan = Loan()
        self._awaited_bytes += num_bytes
        try:
            timeout_s = self._address.timeout_s(self._awaited_bytes)
            reader = ObjectReader(self._connections, key, into, loan, time.monotonic() + timeout_s)
            outcome = await self._within(timeout_s, self._fetch(reader))
        finally:
            self._awaited_bytes -= num_bytes
            loan.close()
        if isinstance(outcome, Failure):
            return Miss(outcome.miss_reason, outcome.detail)
        return outcome

    async def _fetch(self, reader: ObjectReader) -> Hit | Miss:
        miss = await self._on(self._readers, reader.read)
        if miss is None:
            return Hit(reader.num_bytes)
        if miss.reason is MissReason.CORRUPT:
            await self._on(self._readers, reader.discard)
        return miss

    async def _put(self, key: ObjectKey, parts: Mapping[str, Part], ttl_ms: int) -> Stored | Exists | Dropped:
        num_bytes = sum(part.spec.num_bytes for part in parts.values())
        refused = self._why_not_put(num_bytes)
        if refused is not None:
            return refused
        loan = Loan()
        self._in_flight_bytes += num_bytes
        try:
            # What waits for the one writing thread is time that the server did not waste.
            timeout_s = self._address.timeout_s(self._in_flight_bytes)
            deadline = time.monotonic() + timeout_s
            writer = ObjectWriter(
                self._connections, key, parts, loan, deadline, self._epoch, ttl_ms, self._budget_bytes
            )
            outcome = await self._within(timeout_s, self._on(self._writers, writer.publish))
        finally:
            self._in_flight_bytes -= num_bytes
            loan.close()
        if isinstance(outcome, Failure):
            return Dropped(outcome.drop_reason, outcome.detail)
        return outcome

    def _why_not_put(self, num_bytes: int) -> Dropped | None:
        if self._closed:
            return Dropped(DropReason.UNAVAILABLE, "the store is closed")
        if num_bytes > self._max_object_bytes:
            return Dropped(DropReason.TOO_LARGE, f"{num_bytes} bytes, at most {self._max_object_bytes}")
        if self._in_flight_bytes + num_bytes > self._max_in_flight_bytes:
            return Dropped(DropReason.NO_ROOM, f"{self._in_flight_bytes} bytes are in flight")
        return None if self._breaker.allows() else Dropped(DropReason.BREAKER_OPEN)

    async def _within(self, timeout_s: float, work: Coroutine[Any, Any, _Result]) -> _Result | Failure:
        """Awaits the work and reports to the breaker. A thread that is late ends soon and alone, its loan closed."""
        try:
            async with asyncio.timeout(timeout_s):
                result = await work
        except (redis.RedisError, OSError, StoreUnavailable) as error:
            failure = failure_of(error)
            (self._breaker.failed if failure.counts_for_breaker else self._breaker.succeeded)()
            return failure
        except asyncio.CancelledError:
            # `close` cancels what still waits for a thread; that is not a cancellation of our caller.
            if not self._closed or _current_task_is_cancelled():
                raise
            return failure_of(StoreUnavailable("the store was closed"))
        self._breaker.succeeded()
        return result

    async def _on(self, threads: ThreadPoolExecutor, work: Callable[..., _Result], *args: Any) -> _Result:
        if self._closed:
            raise StoreUnavailable("the store was closed")
        return await asyncio.get_running_loop().run_in_executor(threads, work, *args)


def _current_task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
