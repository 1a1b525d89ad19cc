"""The embedded store as a deployment, so that it lives and dies with the application however that was started."""

import asyncio
import json
import logging
from pathlib import Path

from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.errors import EmbeddedServerError
from warmstate.cluster.launch.logs import LogLevel, set_up_logging
from warmstate.cluster.launch.loopback import stay_on_loopback
from warmstate.cluster.running_store import RunningStore, announce

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S = 1.0


class StoreDeployment:
    """Starts the server, and starts it again at the same address when it dies: an empty store is a slow store, but a
    store that stays away is none. When this process dies too, Serve starts another, which finds the address in Ray."""

    # Serve awaits a constructor that is a coroutine; a task can only be started from one.
    async def __init__(self, max_memory_bytes: int, log_level: LogLevel) -> None:  # type: ignore[misc]
        stay_on_loopback()
        set_up_logging(log_level, "store")
        self._max_memory_bytes = max_memory_bytes
        name = f"warmstate/store/{serve.get_replica_context().app_name}"
        self._server = await asyncio.to_thread(_start, max_memory_bytes, name.encode())
        logger.info("the embedded store listens at %s", self._server.url)
        self._announced = _announce(self._server)
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
        if self._announced is not None:
            self._announced.unlink(missing_ok=True)
        self._watch.cancel()
        await asyncio.to_thread(self._server.stop)


def _announce(server: EmbeddedServer) -> Path | None:
    """For `warmstate cache`; without it that must be told where the store is."""
    try:
        return announce(RunningStore(server.url, server.password))
    except OSError as error:
        logger.warning("`warmstate cache` will not find this store by itself: %s", error)
        return None


def _start(max_memory_bytes: int, name: bytes) -> EmbeddedServer:
    """Where replicas and ingress knew an earlier life of the store, and elsewhere only if that port is taken."""
    if (known := _internal_kv_get(name)) is not None:
        port, password = json.loads(known)
        try:
            return EmbeddedServer(max_memory_bytes, port=port, password=password)
        except EmbeddedServerError as error:
            logger.warning("the embedded store cannot come back to port %d: %s", port, error)
    server = EmbeddedServer(max_memory_bytes)
    _internal_kv_put(name, json.dumps([server.port, server.password]).encode(), overwrite=True)
    return server
