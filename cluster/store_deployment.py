"""The embedded store as a deployment, so that it lives and dies with the application however that was started."""

import asyncio
import logging

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.errors import EmbeddedServerError

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S = 1.0


class StoreDeployment:
    """Starts the server, and starts it again at the same address when it dies: an empty store is a slow store, but a
    store that stays away is none. Serve's own restart would move it to another port."""

    # Serve awaits a constructor that is a coroutine; a task can only be started from one.
    async def __init__(self, max_memory_bytes: int) -> None:  # type: ignore[misc]
        self._max_memory_bytes = max_memory_bytes
        self._server = await asyncio.to_thread(EmbeddedServer, max_memory_bytes)
        self._watch = asyncio.create_task(self._keep_running())

    async def address(self) -> tuple[str, str]:
        """The url and the password."""
        return self._server.url, self._server.password

    async def _keep_running(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            if self._server.pid is None:
                await asyncio.to_thread(self._restart)

    def _restart(self) -> None:
        logger.warning("the embedded store on port %d has died; starting it again, empty", self._server.port)
        dead = self._server
        dead.stop()
        try:
            self._server = EmbeddedServer(self._max_memory_bytes, port=dead.port, password=dead.password)
        except EmbeddedServerError as error:
            logger.error("the embedded store could not be started again: %s", error)

    async def __del__(self) -> None:
        """Serve awaits this when it takes the deployment down."""
        self._watch.cancel()
        await asyncio.to_thread(self._server.stop)
