"""The replicas as their rows in the store show them, and the prefix index that their events feed. Knows no Serve."""

import logging
import threading
from collections.abc import Collection, Mapping
from typing import get_args

from warmstate.cache_store.errors import StoreUnavailable
from warmstate.cache_store.event_follower import EventFollower
from warmstate.cache_store.prefix_index import STORE_HOLDER, PrefixIndex
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.replica_rows import ReplicaRow, ReplicaRows
from warmstate.cluster.routing.replica_view import with_ready
from warmstate.cluster.routing.router import RoutingTable
from warmstate.replicas.messages import ReplicaPhase

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0


class StoreView:
    """Reads the rows once a second on a thread of its own. While the store is away the last rows stand."""

    def __init__(self, address: StoreAddress, table: RoutingTable, index: PrefixIndex) -> None:
        self._address = address
        self._table = table
        self._index = index
        self._rows: Mapping[str, ReplicaRow] = {}
        self._reader = ReplicaRows(address)
        self._followers: dict[str, EventFollower] = {}
        self._is_away: bool | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warmstate-rows", daemon=True)
        self._thread.start()

    def ready(self) -> Collection[str]:
        return self._table.loads.keys()

    def phases(self) -> dict[str, ReplicaPhase]:
        return with_ready({replica_id: _phase(row) for replica_id, row in self._rows.items()}, self.ready())

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for follower in self._followers.values():
            follower.close()
        self._reader.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._refresh()
            self._closed.wait(_PERIOD_S)

    def _refresh(self) -> None:
        try:
            self._rows = self._reader.read()
        except StoreUnavailable as error:
            if not self._is_away:
                logger.warning(
                    "the store is away; nothing is shared until it is back, and routing goes on with what is known: %s",
                    error,
                )
            self._is_away = True
            return
        if self._is_away is not False:
            logger.info("the store %s", "is back" if self._is_away else "answers")
        self._is_away = False
        self._follow_namespaces()
        # A replica that is merely late with its row still has what it told, and will not tell it again.
        alive = {STORE_HOLDER, *self._rows, *self._table.loads}
        for holder in self._index.holders().keys() - alive:
            self._index.drop_holder(holder)

    def _follow_namespaces(self) -> None:
        for row in self._rows.values():
            if row.namespace and row.namespace not in self._followers:
                follower = EventFollower(self._address, bytes.fromhex(row.namespace), self._index)
                self._followers[row.namespace] = follower


def _phase(row: ReplicaRow) -> ReplicaPhase:
    """A phase that this version does not know comes from a newer replica, which is not ready for us."""
    known = get_args(ReplicaPhase.__annotations__["phase"])
    return ReplicaPhase(row.phase if row.phase in known else "loading", row.fraction, row.detail)  # type: ignore[arg-type]
