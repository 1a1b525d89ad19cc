"""Owns answers on the wire while a client may leave: server-sent events, and work that ends with its client."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

CLIENT_LEFT = 499
"""nginx's status for a client that closed the connection; only logs see it."""


class ClientLeft(Exception):
    """The client closed the connection before its answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, cancelled when the client disconnects; raises `ClientLeft` then. The body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if task.cancelled():
        raise ClientLeft
    return task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Frames(Protocol):
    """Where a stream's bytes come from."""

    def frames(self) -> AsyncGenerator[bytes, None]:
        """The bytes to send, in pieces."""
        ...

    async def close(self) -> None:
        """Stops the work behind them. May be called again."""
        ...


class EventStream(Response):
    """A streamed answer. Closes its source when all is sent, and at once when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, source: Frames, headers: Mapping[str, str]) -> None:
        # X-Accel-Buffering: proxies such as nginx would otherwise collect the events.
        fixed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**headers, **fixed})
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientLeft:
            return
        finally:
            await self._source.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._source.frames()) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
