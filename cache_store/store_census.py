"""Owns the count of what the rows of a store describe, and the search for rows that contradict each other.

Blocking; every call may raise the client's errors.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import redis

from warmstate.cache_store.index_editor import RowsOf
from warmstate.cache_store.keys import SEGMENT_TOKENS
from warmstate.cache_store.names import IndexNames
from warmstate.cache_store.store_ledger import NamespaceLedger, load_ledger

RECOUNT_AFTER_S = 60.0
"""Rows change with events, whose stream is looked at; what does not follow that is found so late."""

_LOAD_SHARE = 0.1
"""Of the time, to read whole namespaces again; where that takes long, it is done less often."""


@dataclass(frozen=True, slots=True)
class _Count:
    num_bytes: int
    last_id: bytes | None
    counted_at: float
    took_s: float


class StoreCensus:
    """Remembers what each namespace held when it was last counted, and counts it again when its stream has moved on."""

    def __init__(self, client: redis.Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._counts: dict[str, _Count] = {}
        self.is_current = False

    @property
    def num_bytes(self) -> int:
        """Of all objects that rows describe. `is_current` says whether nothing had moved on at the last look."""
        return sum(count.num_bytes for count in self._counts.values())

    def look(self, namespaces: Iterable[IndexNames]) -> list[NamespaceLedger]:
        """The rows of the namespaces that were counted again."""
        names = {each.short: each for each in namespaces}
        self._counts = {short: count for short, count in self._counts.items() if short in names}
        self.is_current = True
        loaded: list[NamespaceLedger] = []
        for short, each in names.items():
            last_id = self._last_id(each)
            if not self._is_due(short, last_id):
                continue
            began = self._clock()
            ledger = load_ledger(self._client, each)
            now = self._clock()
            self._counts[short] = _Count(ledger.num_bytes, last_id, now, now - began)
            loaded.append(ledger)
        return loaded

    def _last_id(self, names: IndexNames) -> bytes | None:
        last = cast(list[tuple[bytes, object]], self._client.xrevrange(names.events, count=1))
        return last[0][0] if last else None

    def _is_due(self, short: str, last_id: bytes | None) -> bool:
        known = self._counts.get(short)
        if known is None:
            return True
        age_s = self._clock() - known.counted_at
        if known.last_id == last_id and age_s < RECOUNT_AFTER_S:
            return False
        is_due = age_s * _LOAD_SHARE >= known.took_s
        self.is_current &= is_due
        return is_due


@dataclass(frozen=True, slots=True)
class BrokenRows:
    """`lost_kv`: checkpoints whose way to the root passes through a segment that has no row. `unneeded_kv`: segments
    through which no other checkpoint's way passes."""

    lost_kv: RowsOf
    unneeded_kv: RowsOf


def find_broken(ledger: NamespaceLedger, older_than_ms: int) -> BrokenRows:
    """Segments younger than `older_than_ms` may be waiting for their checkpoint."""
    whole: set[bytes] = set()
    for key, segment in sorted(ledger.segments.items(), key=lambda item: item[1].position):
        above = segment.parent_key
        if above is None or (above in whole and ledger.segments[above].position == segment.position - SEGMENT_TOKENS):
            whole.add(key)
    needed: set[bytes] = set()
    lost_kv = {}
    for key, row in ledger.checkpoints.items():
        segment_key, stop = row.segment_key, row.position // SEGMENT_TOKENS * SEGMENT_TOKENS
        if segment_key is None:
            continue
        if segment_key not in whole or ledger.segments[segment_key].position != stop:
            lost_kv[key] = row
            continue
        while segment_key is not None and segment_key not in needed:
            needed.add(segment_key)
            segment_key = ledger.segments[segment_key].parent_key
    unneeded = {
        key: row for key, row in ledger.segments.items() if key not in needed and row.created_ms < older_than_ms
    }
    return BrokenRows(RowsOf(lost_kv, {}), RowsOf({}, unneeded))
