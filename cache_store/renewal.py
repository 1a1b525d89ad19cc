"""Owns that what is used lives on: the objects of checkpoints that were fetched get their full time to live again.

Only the consumed checkpoint and the KV it needs, not the shallower checkpoints on its path. Blocking; calls raise the
client's errors.
"""

from collections.abc import Iterator
from itertools import islice

import redis

from warmstate.cache_store.index_loader import find_checkpoints, find_segments, iter_numbers
from warmstate.cache_store.names import IndexNames, checkpoint_names, segment_name

_BATCH = 500


class Renewal:
    """Remembers up to which use it has renewed."""

    def __init__(self, index: redis.Redis, payload: redis.Redis) -> None:
        self._index = index
        self._payload = payload
        self._renewed_ms: dict[str, int] = {}

    def renew(self, names: IndexNames) -> int:
        """Renews what was used since the last call; gives the number of checkpoints."""
        since_ms = latest_ms = self._renewed_ms.get(names.short, 0)
        num_renewed = 0
        used = ((key, at_ms) for key, at_ms in iter_numbers(self._index, names.uses) if at_ms > since_ms)
        while batch := dict(islice(used, _BATCH)):
            latest_ms = max(latest_ms, *batch.values())
            num_renewed += self._renew(names, list(batch))
        self._renewed_ms[names.short] = latest_ms
        return num_renewed

    def _renew(self, names: IndexNames, keys: list[bytes]) -> int:
        rows = find_checkpoints(self._index, names, keys)
        pipeline = self._payload.pipeline(transaction=False)
        wanted: dict[bytes, int] = {}
        for key, row in rows.items():
            for name in checkpoint_names(names, key, row.num_groups):
                pipeline.pexpire(name, 1000 * row.ttl_s, gt=True)
            if row.segment_key is not None:
                wanted[row.segment_key] = max(row.ttl_s, wanted.get(row.segment_key, 0))
        for key, ttl_s in self._with_those_above(names, wanted):
            pipeline.pexpire(segment_name(names, key), 1000 * ttl_s, gt=True)
        pipeline.execute()
        return len(rows)

    def _with_those_above(self, names: IndexNames, wanted: dict[bytes, int]) -> Iterator[tuple[bytes, int]]:
        """The segments that are wanted and all before them, with the time that each is wanted for."""
        seen: dict[bytes, int] = {}
        while wanted:
            yield from wanted.items()
            seen |= wanted
            above: dict[bytes, int] = {}
            for key, row in find_segments(self._index, names, list(wanted)).items():
                parent = row.parent_key
                if parent is not None and seen.get(parent, 0) < wanted[key]:
                    above[parent] = max(wanted[key], above.get(parent, 0))
            wanted = above
