"""Owns what this replica tells others of its prefixes, and what it hears of the shared store's. Never waits for I/O."""

from collections.abc import Sequence

from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import PrefixEvent
from warmstate.cache_store.prefix_index import STORE_HOLDER, IndexRow, PrefixIndex


class EventDirectory:
    """A `store_link.StoreDirectory` over an index that an `EventFollower` keeps up to date."""

    def __init__(self, index: PrefixIndex, log: EventLog) -> None:
        self._index = index
        self._log = log

    def find_positions(self, keys: Sequence[bytes]) -> list[int]:
        return self._index.positions(keys, STORE_HOLDER)

    def put(self, key: bytes, position: int) -> None:
        self._index.insert(key, STORE_HOLDER, IndexRow(position, "store"))
        self._log.append(PrefixEvent("add", key, position, "store"))

    def remove(self, key: bytes, position: int) -> None:
        """Tells only what somebody may believe: an unknown row needs no correction."""
        if self._index.find(key, STORE_HOLDER) is not None:
            self._index.remove(key, STORE_HOLDER)
            self._log.append(PrefixEvent("remove", key, position, "store"))

    def tell_local(self, key: bytes, position: int, usable: bool) -> None:
        """Tells routers that this replica's own tiers can, or can no longer, serve a prefix."""
        self._log.append(PrefixEvent("add" if usable else "remove", key, position, "host"))
