"""Owns the thread that steps an engine, and the way in and out of it. Knows one event loop; no HTTP and no Ray."""

import asyncio
import threading
import time
from collections.abc import Callable

import torch

from warmstate.replicas.delta_stream import DeltaStream
from warmstate.replicas.engine import Engine, SequenceDelta
from warmstate.replicas.errors import InvalidRequest, QueueFull
from warmstate.replicas.messages import FinishReason, GenerateRequest, TokenDelta

_STATS_PERIOD_S = 0.5
_SETTLE_S = 0.02


class EngineThread:
    """Steps while there is work and sleeps otherwise. Everything but the thread itself belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        max_queue: int,
        num_threads: int,
        loop: asyncio.AbstractEventLoop,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._max_queue = max_queue
        self._num_threads = num_threads
        self._loop = loop
        self._on_death = on_death
        self._streams: dict[str, DeltaStream] = {}
        self._stopping = False
        self._stats: dict[str, float] = engine.stats()
        self._stats_at = 0.0
        self._thread = threading.Thread(target=self._run, name="warmstate-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> DeltaStream:
        """Queues a request; its deltas come through the stream, the last one with a finish_reason.

        Raises `PromptTooLong`, `InvalidRequest` or `QueueFull`.
        """
        if request.request_id in self._streams:
            raise InvalidRequest(f"a request with the id {request.request_id} is being answered")
        self._engine.check(request)
        num_waiting = self._engine.num_waiting
        if num_waiting >= self._max_queue:
            raise QueueFull(f"{num_waiting} requests wait already, and at most {self._max_queue} may")
        stream = self._streams[request.request_id] = DeltaStream()
        self._engine.post(lambda: self._engine.add(request))
        return stream

    def cancel(self, request_id: str) -> None:
        """Ends a request and drops its stream; one that has ended already is no error."""
        if self._streams.pop(request_id, None) is not None:
            self._engine.post(lambda: self._engine.cancel(request_id))

    @property
    def stats(self) -> dict[str, float]:
        """The engine's figures, at most about half a second old while it steps."""
        return self._stats

    async def close(self) -> None:
        """Ends the thread after its current step; open streams end with an error."""
        self._engine.post(self._stop)
        await asyncio.to_thread(self._thread.join)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while not self._stopping:
                deltas = self._engine.step()
                if deltas:
                    self._loop.call_soon_threadsafe(self._deliver, deltas)
                # The step may itself have done the posted stop, and then nothing would ever end the wait.
                elif deltas is None and not self._stopping:
                    self._rest()
                if time.monotonic() - self._stats_at > _STATS_PERIOD_S:
                    self._take_stats()
        finally:
            self._loop.call_soon_threadsafe(self._end_streams)

    def _rest(self) -> None:
        """Sleeps until there is work. The figures wait until the last deltas are on their way: that is what somebody
        waits for, and both need this process's one interpreter."""
        if not self._engine.wait_for_work(_SETTLE_S):
            self._take_stats()
            self._engine.wait_for_work()
            # Nothing has changed since: they must not keep the new work waiting.
            self._stats_at = time.monotonic()

    def _take_stats(self) -> None:
        self._stats, self._stats_at = self._engine.stats(), time.monotonic()

    def _deliver(self, deltas: list[SequenceDelta]) -> None:
        for item in deltas:
            stream = self._streams.get(item.request_id)
            if stream is None:
                continue
            stream.put(item.delta)
            if item.delta.finish_reason is not None:
                del self._streams[item.request_id]

    def _end_streams(self) -> None:
        """Nobody waits for ever for a thread that has ended."""
        if not self._stopping:
            self._on_death()
        for stream in self._streams.values():
            stream.put(TokenDelta((), finish_reason=FinishReason.ERROR, error="the engine has stopped"))
        self._streams.clear()
