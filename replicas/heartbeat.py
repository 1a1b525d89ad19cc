"""Owns the row that tells others of this replica, renewed each second. Knows no engine."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from warmstate.cache_store.errors import StoreUnavailable
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.replica_rows import ReplicaRow, ReplicaRows

_LOG = logging.getLogger(__name__)

_PERIOD_S = 1.0


class Heartbeat:
    """Writes `row()` each second from a task; a server that is away is logged once and tried again."""

    def __init__(self, address: StoreAddress, row: Callable[[], ReplicaRow]) -> None:
        self._rows = ReplicaRows(address)
        self._row = row
        self._is_away = False
        self._task = asyncio.create_task(self._run())

    async def beat(self) -> None:
        """Writes the row now."""
        try:
            await asyncio.to_thread(self._rows.write, self._row())
        except StoreUnavailable as error:
            if not self._is_away:
                _LOG.warning("this replica's row cannot be written: %s", error)
            self._is_away = True
        else:
            self._is_away = False

    async def close(self) -> None:
        """Takes the row away, where the server answers."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        with contextlib.suppress(StoreUnavailable):
            await asyncio.to_thread(self._rows.delete, self._row().replica_id)
        self._rows.close()

    async def _run(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(_PERIOD_S)
