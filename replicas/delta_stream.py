"""Owns one request's deltas between the engine's thread and their reader. Belongs to one event loop."""

import asyncio

from warmstate.replicas.messages import TokenDelta


class DeltaStream:
    """Deltas not yet read are handed out as one. A single reader."""

    def __init__(self) -> None:
        self._unread: TokenDelta | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> None:
        self._unread = delta if self._unread is None else _joined(self._unread, delta)
        _wake(self._reader)

    async def get(self) -> TokenDelta:
        """What has come since the last call; waits for something."""
        delta = await self.get_within(None)
        assert delta is not None, "only a limit ends the wait without a delta"
        return delta

    async def get_within(self, seconds: float | None) -> TokenDelta | None:
        """The same; None, and nothing lost, when it takes longer. `seconds` of None is for ever."""
        if self._unread is None and seconds != 0:
            await self._wait(seconds)
        delta, self._unread = self._unread, None
        return delta

    async def _wait(self, seconds: float | None) -> None:
        """A bare timer: `asyncio.timeout` would cost more than all else on the way of a token."""
        loop = asyncio.get_running_loop()
        self._reader = reader = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _wake, reader)
        try:
            await reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()


def _wake(reader: asyncio.Future[None] | None) -> None:
    if reader is not None and not reader.done():
        reader.set_result(None)


def _joined(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """Two deltas of one sequence as one."""
    return TokenDelta(
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        second.finish_reason,
        first.num_cached_tokens if first.num_cached_tokens is not None else second.num_cached_tokens,
        first.cache_source if first.num_cached_tokens is not None else second.cache_source,
        second.error,
    )
