"""Owns the knowledge of who can serve which prefix. Pure: no I/O, no clock; used by replicas and by routers."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal

Tier = Literal["device", "host", "store"]

STORE_HOLDER = "store"
"""The holder of what the shared store has: every replica can serve it."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One holder can resume at `position`."""

    position: int
    tier: Tier


class PrefixIndex:
    """Rows {prefix key -> {holder -> IndexRow}}, bounded: beyond `max_keys` the key used least recently goes.

    Only usable prefixes belong in here (KV, recurrent and conv state all there). Thread-safe.
    """

    def __init__(self, max_keys: int = 200_000) -> None:
        self._max_keys = max_keys
        self._lock = Lock()
        self._rows: OrderedDict[bytes, dict[str, IndexRow]] = OrderedDict()
        self._keys_of: dict[str, set[bytes]] = {}

    def insert(self, key: bytes, holder: str, row: IndexRow) -> None:
        """Adds or replaces the holder's row."""
        with self._lock:
            self._rows.setdefault(key, {})[holder] = row
            self._rows.move_to_end(key)
            self._keys_of.setdefault(holder, set()).add(key)
            while len(self._rows) > self._max_keys:
                oldest = next(iter(self._rows))
                for other in list(self._rows[oldest]):
                    self._remove(oldest, other)

    def remove(self, key: bytes, holder: str) -> None:
        """Forgets one row; an absent one is no error."""
        with self._lock:
            self._remove(key, holder)

    def drop_holder(self, holder: str) -> None:
        """Forgets all rows of a holder, e.g. of a replica that died."""
        with self._lock:
            for key in list(self._keys_of.get(holder, ())):
                self._remove(key, holder)

    def deepest(self, keys: Sequence[bytes]) -> dict[str, int]:
        """The deepest position that each holder can serve. `keys` go from the shallowest boundary to the deepest;
        a holder that has none of them is left out."""
        positions: dict[str, int] = {}
        with self._lock:
            num_holders = len(self._keys_of)
            for key in reversed(keys):
                rows = self._rows.get(key)
                if rows is None:
                    continue
                self._rows.move_to_end(key)
                for holder, row in rows.items():
                    positions.setdefault(holder, row.position)
                if len(positions) == num_holders:
                    break
        return positions

    def positions(self, keys: Sequence[bytes], holder: str) -> list[int]:
        """Every position that the holder can serve on the path of `keys`, the shallowest first."""
        found: list[int] = []
        with self._lock:
            for key in keys if holder in self._keys_of else ():
                row = self._rows.get(key, {}).get(holder)
                if row is not None:
                    self._rows.move_to_end(key)
                    found.append(row.position)
        return found

    def find(self, key: bytes, holder: str) -> IndexRow | None:
        with self._lock:
            return self._rows.get(key, {}).get(holder)

    def holders(self) -> dict[str, int]:
        """How many rows each holder has."""
        with self._lock:
            return {holder: len(keys) for holder, keys in self._keys_of.items()}

    def __len__(self) -> int:
        """The number of distinct keys."""
        return len(self._rows)

    def _remove(self, key: bytes, holder: str) -> None:
        rows = self._rows.get(key)
        if rows is None or rows.pop(holder, None) is None:
            return
        if not rows:
            del self._rows[key]
        keys = self._keys_of[holder]
        keys.discard(key)
        if not keys:
            del self._keys_of[holder]
