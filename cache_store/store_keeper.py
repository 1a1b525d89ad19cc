"""Owns what only one replica does for all: it evicts before the server must, and clears away what is lost or dead.

A thread of its own, which stands by while another replica holds the lease. It sees objects only by name. Rows go before
the objects they describe, in a transaction that a later holder of the lease makes fail.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from warmstate.cache_store.errors import LeaseLost
from warmstate.cache_store.eviction_rows import EvictionReason
from warmstate.cache_store.index_editor import IndexEditor, RowsOf
from warmstate.cache_store.index_loader import read_namespaces, read_snapshots, sample_checkpoints, sample_segments
from warmstate.cache_store.lease import LEASE_TTL_MS, EvictionLease
from warmstate.cache_store.names import IndexNames, checkpoint_names, replica_row_name, segment_name
from warmstate.cache_store.orphans import GRACE_S, OrphanSearch
from warmstate.cache_store.redis_client import StoreAddress, open_client
from warmstate.cache_store.renewal import Renewal
from warmstate.cache_store.store_ledger import load_ledger, plan

logger = logging.getLogger(__name__)

KEEPER_PERIOD_S = 5.0

_BATCH = 64
_SAMPLE = 32
_MAX_SAMPLES = 8
_COUNTERS = (
    "rounds",
    "failures",
    *(f"evictions_{reason}" for reason in EvictionReason),
    "evicted_bytes",
    "checkpoints_renewed",
    "rows_reconciled",
    "rows_unreadable",
    "orphans_removed",
    "namespaces_forgotten",
)


@dataclass(frozen=True, slots=True)
class KeeperLimits:
    """How full the payload server may become: eviction begins at `high_water` of the budget and ends at `low_water`.

    `budget_bytes` None means the server's own maxmemory; a server without any evicts nothing. A namespace that no
    replica has spoken for in `dead_after_s` is cleared away.
    """

    budget_bytes: int | None = None
    high_water: float = 0.85
    low_water: float = 0.80
    dead_after_s: float = 86_400.0


class StoreKeeper:
    """One candidate for keeping the store. `candidate` names it in the lease."""

    def __init__(
        self,
        index: StoreAddress,
        payload: StoreAddress,
        candidate: str,
        limits: KeeperLimits,
        period_s: float = KEEPER_PERIOD_S,
        lease_ttl_ms: int = LEASE_TTL_MS,
        orphan_grace_s: float = GRACE_S,
    ) -> None:
        self._index = open_client(index, max_connections=2)
        self._payload = open_client(payload, max_connections=1)
        self._limits = limits
        self._period_s = period_s
        self._lease = EvictionLease(self._index, candidate, lease_ttl_ms)
        self._editor = IndexEditor(self._lease, candidate)
        self._orphans = OrphanSearch(self._index, self._payload, orphan_grace_s)
        self._renewal = Renewal(self._index, self._payload)
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))
        self._gauges: dict[str, float] = dict.fromkeys(("used_bytes", "budget_bytes", "rows", "index_bytes"), 0.0)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warmstate-keeper", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, float]:
        """Counters since the start, and how full the store was when this replica last looked."""
        counts = {name: float(count) for name, count in self._counts.items()}
        lease = {"lease_held": float(self._lease.is_held), "lease_lost": float(self._lease.num_lost)}
        return {**counts, **self._gauges, **lease, "thread_alive": float(self._thread.is_alive())}

    def close(self) -> None:
        """Ends the thread after the batch that it is at, and lets another replica take over at once."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._keep()
        except Exception:
            logger.exception("the thread that looks after the store has ended; another replica takes over")
        try:
            self._lease.release()
        except (redis.RedisError, OSError):
            self._counts["failures"] += 1
        self._index.close()
        self._payload.close()

    def _keep(self) -> None:
        while not self._closing.wait(self._period_s):
            try:
                if self._lease.hold():
                    self._round()
            except (redis.RedisError, OSError):
                self._counts["failures"] += 1
            except LeaseLost:
                continue

    def _round(self) -> None:
        """One look at everything, in bounded steps."""
        namespaces = read_namespaces(self._index)
        names = {short: IndexNames(short) for short in namespaces}
        for each in names.values():
            self._lease.claim(each)
        is_freeing = self._measure(names.values())
        is_full = self._gauges["used_bytes"] > self._limits.high_water * self._gauges["budget_bytes"] > 0
        if is_full and not is_freeing:
            self._evict(names.values())
        for each in names.values():
            self._counts["checkpoints_renewed"] += self._renewal.renew(each)
            self._reconcile(each)
            self._forget_dead_replicas(each)
        self._remove_orphans(names)
        for short, (_, said_ms) in namespaces.items():
            if _now_ms() - said_ms > 1000 * self._limits.dead_after_s:
                self._editor.forget_namespace(self._index, names[short])
                self._counts["namespaces_forgotten"] += 1
        self._counts["rounds"] += 1

    def _measure(self, namespaces: Iterable[IndexNames]) -> bool:
        """Whether the server is still freeing what was unlinked: what it says of its memory is not the last word then.

        How full the store is goes into the gauges.
        """
        info: Mapping[str, Any] = self._payload.info("memory")
        budget_bytes = self._limits.budget_bytes or int(info.get("maxmemory", 0))
        rows = index_bytes = 0
        for names in namespaces:
            rows += self._index.hlen(names.checkpoints) + self._index.hlen(names.segments)
            index_bytes += sum(self._index.memory_usage(name) or 0 for name in names.all())
        self._gauges.update(
            used_bytes=float(info["used_memory"]),
            budget_bytes=float(budget_bytes),
            rows=float(rows),
            index_bytes=float(index_bytes),
        )
        return int(info.get("lazyfree_pending_objects", 0)) > 0

    def _evict(self, namespaces: Iterable[IndexNames]) -> None:
        """Gives up what is worth least until the low water; the server frees what is unlinked in the background."""
        ledgers = [load_ledger(self._index, names) for names in namespaces]
        surplus_bytes = int(self._gauges["used_bytes"] - self._limits.low_water * self._gauges["budget_bytes"])
        planned = plan(ledgers, surplus_bytes, _now_ms())
        for start in range(0, len(planned), _BATCH):
            if self._closing.is_set() or not self._lease.hold():
                return
            batch = planned[start : start + _BATCH]
            for ledger in ledgers:
                mine = [evicted for owner, evicted in batch if owner is ledger]
                rows = RowsOf(
                    {each.key: ledger.checkpoints[each.key] for each in mine if each.kind == "ck"},
                    {each.key: ledger.segments[each.key] for each in mine if each.kind == "kv"},
                )
                self._give_up(ledger.names, rows)
                self._counts.update(f"evictions_{each.reason}" for each in mine)
                self._counts["evicted_bytes"] += rows.num_bytes

    def _give_up(self, names: IndexNames, rows: RowsOf) -> None:
        if rows.is_empty:
            return
        self._editor.remove(names, rows)
        self._unlink(_objects_of(names, rows))

    def _reconcile(self, names: IndexNames) -> None:
        """Removes rows whose objects the server has lost: by samples, more of them while many rows prove wrong."""
        for _ in range(_MAX_SAMPLES):
            checkpoints = sample_checkpoints(self._index, names, _SAMPLE)
            segments = sample_segments(self._index, names, _SAMPLE)
            self._editor.remove_unreadable(names, checkpoints.unreadable, segments.unreadable)
            self._counts["rows_unreadable"] += len(checkpoints.unreadable) + len(segments.unreadable)
            lost = self._lost(names, RowsOf(checkpoints.rows, segments.rows))
            if not lost.is_empty:
                self._editor.remove(names, lost)
            self._counts["rows_reconciled"] += len(lost)
            if 4 * len(lost) <= len(checkpoints.rows) + len(segments.rows):
                return

    def _lost(self, names: IndexNames, rows: RowsOf) -> RowsOf:
        """Those of which the server lacks an object."""
        objects = _objects_of(names, rows)
        pipeline = self._payload.pipeline(transaction=False)
        for name in objects:
            pipeline.exists(name)
        missing = {name for name, exists in zip(objects, pipeline.execute(), strict=True) if not exists}
        checkpoints, segments = rows.checkpoints.items(), rows.segments.items()
        return RowsOf(
            {key: row for key, row in checkpoints if missing & {*checkpoint_names(names, key, row.num_groups)}},
            {key: row for key, row in segments if segment_name(names, key) in missing},
        )

    def _forget_dead_replicas(self, names: IndexNames) -> None:
        """A replica without a row and a snapshot is dead; with its id in the set, every newcomer reads the stream from
        its beginning."""
        found = read_snapshots(self._index, names)
        dead: list[str | bytes] = [each for each in found.without if not self._index.exists(replica_row_name(each))]
        dead += [member for member in found.unreadable if not _is_text(member)]
        if dead:
            self._lease.change(names, lambda pipeline: pipeline.srem(names.replicas, *dead))

    def _remove_orphans(self, namespaces: Mapping[str, IndexNames]) -> None:
        """A writer that could not finish its checkpoint still takes the KV that it did put for there."""
        objects = self._orphans.find()
        self._unlink([str(each) for each in objects])
        self._counts["orphans_removed"] += len(objects)
        for short, names in namespaces.items():
            lost = [each.prefix for each in objects if each.kind == "kv" and each.short_namespace == short]
            if lost:
                self._editor.tell_lost_segments(names, lost)

    def _unlink(self, objects: Sequence[str]) -> None:
        # One command per key: on a cluster they lie in different slots.
        pipeline = self._payload.pipeline(transaction=False)
        for name in objects:
            pipeline.unlink(name)
        pipeline.execute()


def _objects_of(names: IndexNames, rows: RowsOf) -> list[str]:
    objects = [segment_name(names, key) for key in rows.segments]
    for key, row in rows.checkpoints.items():
        objects += checkpoint_names(names, key, row.num_groups)
    return objects


def _is_text(member: bytes) -> bool:
    return member.decode("utf-8", "ignore").encode() == member


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
