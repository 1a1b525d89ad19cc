"""Owns reading several reply streams at once and closing them. Knows no text and no HTTP."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import ClassVar

from warmstate.cluster.errors import ApiError, GenerationFailed, ReplicaLost, refusal
from warmstate.replicas.messages import Accepted, Refused, Reply, TokenDelta


class FanIn:
    """Streams of replies as one; what has arrived meanwhile is handed out together.

    A stream is closed by cancelling the task that reads it, which also reaches a generator that is waiting. A stream
    that has had its last delta is left to end by itself: nobody waits for that, and a cancel would cost a message.
    """

    _ending: ClassVar[set[asyncio.Task[None]]] = set()

    def __init__(self, streams: Sequence[AsyncGenerator[Reply, None]]) -> None:
        self._arrived: deque[tuple[int, TokenDelta]] = deque()
        self._heads: dict[int, Accepted | Refused] = {}
        self._unfinished = set(range(len(streams)))
        self._finished: set[int] = set()
        self._fault: BaseException | None = None
        self._changed = asyncio.Event()
        self._pumps = [asyncio.create_task(self._pump(i, stream)) for i, stream in enumerate(streams)]
        for i, pump in enumerate(self._pumps):
            pump.add_done_callback(partial(self._ended, i))

    async def open(self) -> list[str]:
        """Waits until every stream is accepted; the replicas' ids in stream order.

        Raises the `ApiError` of the first refusal, with every stream closed.
        """
        try:
            while len(self._heads) < len(self._pumps):
                self._raise_fault()
                await self._next_change()
                self._raise_refusal()
        except BaseException:
            await self.close()
            raise
        return [head.replica_id for _, head in sorted(self._heads.items()) if isinstance(head, Accepted)]

    async def batches(self) -> AsyncGenerator[list[tuple[int, TokenDelta]], None]:
        """All deltas available, with the index of their stream, until every stream has finished or was closed."""
        while self._arrived or self._unfinished:
            if not self._arrived:
                self._raise_fault()
                await self._next_change()
            batch = list(self._arrived)
            self._arrived.clear()
            if batch:
                yield batch

    async def close_one(self, index: int) -> None:
        """Cancels one stream; what it had still to say is dropped."""
        self._unfinished.discard(index)
        await self._cancel([self._pumps[index]])

    async def close(self) -> None:
        """Cancels every stream that has not finished. May be called again."""
        self._unfinished.clear()
        await self._cancel([pump for i, pump in enumerate(self._pumps) if i not in self._finished])

    async def _cancel(self, pumps: Sequence[asyncio.Task[None]]) -> None:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _next_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise _translated(self._fault) from self._fault

    def _raise_refusal(self) -> None:
        for head in self._heads.values():
            if isinstance(head, Refused):
                raise refusal(head.status, head.message, head.retry_after_s)

    async def _pump(self, index: int, stream: AsyncGenerator[Reply, None]) -> None:
        try:
            async for reply in stream:
                if isinstance(reply, TokenDelta):
                    self._arrived.append((index, reply))
                    if reply.finish_reason is not None:
                        self._finish(index)
                elif isinstance(reply, Refused) and index in self._heads:
                    raise refusal(reply.status, reply.message, reply.retry_after_s)
                else:
                    self._heads[index] = reply
                self._changed.set()
        finally:
            await stream.aclose()

    def _finish(self, index: int) -> None:
        self._unfinished.discard(index)
        self._finished.add(index)
        # The event loop itself holds tasks weakly.
        self._ending.add(self._pumps[index])
        self._pumps[index].add_done_callback(self._ending.discard)

    def _ended(self, index: int, pump: asyncio.Task[None]) -> None:
        fault = None if pump.cancelled() else pump.exception()
        head = self._heads.get(index)
        if fault is None and (head is None or (index in self._unfinished and isinstance(head, Accepted))):
            fault = ReplicaLost("the replica ended its reply without finishing the request")
        if fault is not None and self._fault is None:
            self._fault = fault
        self._changed.set()


def _translated(fault: BaseException) -> ApiError:
    """The client learns that the replica failed, not how; the cause stays attached for the log."""
    return fault if isinstance(fault, ApiError) else GenerationFailed("the replica failed while working on the request")
