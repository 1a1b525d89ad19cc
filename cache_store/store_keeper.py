"""Owns what only one replica does for all: it evicts before the server must, and clears away what is lost or dead.

A thread of its own, which stands by while another replica holds the lease. It sees objects only by name. Rows go before
the objects they describe, in a transaction that a later holder of the lease makes fail.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from warmstate.cache_store.compute_costs import update_costs
from warmstate.cache_store.errors import LeaseLost
from warmstate.cache_store.eviction_rows import EvictionReason
from warmstate.cache_store.index_editor import IndexEditor, RowsOf
from warmstate.cache_store.index_loader import read_namespaces, read_snapshots, sample_checkpoints, sample_segments
from warmstate.cache_store.lease import LEASE_TTL_MS, EvictionLease
from warmstate.cache_store.lost_rows import find_lost, objects_of
from warmstate.cache_store.names import ROOM, IndexNames, replica_row_name
from warmstate.cache_store.orphans import GRACE_S, OrphanSearch
from warmstate.cache_store.redis_client import StoreAddress, open_client
from warmstate.cache_store.renewal import Renewal
from warmstate.cache_store.room import read_room, read_wanted, settle_room
from warmstate.cache_store.store_census import StoreCensus, find_broken
from warmstate.cache_store.store_ledger import NamespaceLedger, load_ledger, plan

logger = logging.getLogger(__name__)

KEEPER_PERIOD_S = 5.0

_MIN_PERIOD_S = 0.5
_BATCH = 64
_SAMPLE = 128
_MAX_SAMPLES = 8
_COUNTERS = (
    "rounds",
    "failures",
    *(f"evictions_{reason}" for reason in EvictionReason),
    "evicted_bytes",
    "checkpoints_renewed",
    *(f"rows_reconciled_{reason}" for reason in ("lost_object", "lost_kv", "unneeded_kv")),
    "rows_unreadable",
    "orphans_removed",
    "namespaces_forgotten",
)
_GAUGES = ("used_bytes", "budget_bytes", "server_bytes", "server_max_bytes", "rows", "index_bytes")


@dataclass(frozen=True, slots=True)
class KeeperLimits:
    """How full the store may become: eviction begins at `high_water` of a limit and ends at `low_water`.

    `budget_bytes` limits what is ours: the payload that rows describe, objects seen without a row, and the index. The
    payload server's maxmemory limits all that the server holds, others' data included; without either limit nothing is
    evicted. A namespace that no replica has spoken for in `dead_after_s` is cleared away.
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
        self._grace_ms = int(1000 * orphan_grace_s)
        self._census = StoreCensus(self._index)
        self._gauges: dict[str, float] = dict.fromkeys(_GAUGES, 0.0)
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
        self._connect()
        due = time.monotonic() + self._period_s
        while not self._closing.is_set():
            now = time.monotonic()
            try:
                if now >= due or (now >= due - self._period_s + _MIN_PERIOD_S and self._is_short()):
                    due = now + self._period_s
                    if self._lease.hold():
                        self._round()
            except (redis.RedisError, OSError):
                self._counts["failures"] += 1
            except LeaseLost:
                pass
            self._closing.wait(min(self._period_s, _MIN_PERIOD_S))

    def _connect(self) -> None:
        """Opens the connections that are kept from now on."""
        try:
            self._index.ping()
            self._payload.ping()
        except (redis.RedisError, OSError):
            self._counts["failures"] += 1

    def _is_short(self) -> bool:
        """Whether a writer was refused for want of room, or they have taken so much of it that one might soon be."""
        budget_bytes = self._limits.budget_bytes
        if not budget_bytes or not self._lease.is_held:
            return False
        room_bytes = read_room(self._payload)
        least_bytes = max((1 - self._limits.high_water) * budget_bytes, read_wanted(self._payload, budget_bytes))
        return room_bytes is not None and room_bytes < least_bytes

    def _round(self) -> None:
        """One look at everything, in bounded steps."""
        namespaces = read_namespaces(self._index)
        names = {short: IndexNames(short) for short in namespaces}
        for each in names.values():
            self._lease.claim(each)
        costs = update_costs(self._index, names.values())
        room_bytes = read_room(self._payload)
        for ledger in self._census.look(names.values()):
            self._remove_broken(ledger)
        surplus_bytes = self._measure(names.values())
        self._settle(room_bytes)
        if surplus_bytes > 0:
            self._evict(names.values(), surplus_bytes, costs)
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

    def _remove_broken(self, ledger: NamespaceLedger) -> None:
        """Removes rows, with their objects, that no reader can use."""
        broken = find_broken(ledger, _now_ms() - self._grace_ms)
        for reason, rows in (("lost_kv", broken.lost_kv), ("unneeded_kv", broken.unneeded_kv)):
            for batch in rows.batches(_BATCH):
                self._give_up(ledger.names, batch)
                self._counts[f"rows_reconciled_{reason}"] += len(batch)

    def _measure(self, namespaces: Iterable[IndexNames]) -> int:
        """How many bytes must go. How full the store is goes into the gauges."""
        info: Mapping[str, Any] = self._payload.info("memory")
        rows = index_bytes = 0
        for names in namespaces:
            rows += self._index.hlen(names.checkpoints) + self._index.hlen(names.segments)
            index_bytes += sum(self._index.memory_usage(name) or 0 for name in names.all())
        used_bytes = self._census.num_bytes + self._orphans.num_bytes + index_bytes
        server_bytes, server_max_bytes = int(info["used_memory"]), int(info.get("maxmemory", 0))
        budget_bytes = self._limits.budget_bytes or server_max_bytes
        self._gauges.update(
            used_bytes=float(used_bytes),
            budget_bytes=float(budget_bytes),
            server_bytes=float(server_bytes),
            server_max_bytes=float(server_max_bytes),
            rows=float(rows),
            index_bytes=float(index_bytes),
        )
        surplus = self._surplus(used_bytes, budget_bytes)
        if self._limits.budget_bytes:
            surplus = max(surplus, used_bytes + read_wanted(self._payload, budget_bytes) - budget_bytes)
        # While the server frees what was unlinked, what it says of its memory is not the last word.
        if int(info.get("lazyfree_pending_objects", 0)) == 0:
            surplus = max(surplus, self._surplus(server_bytes, server_max_bytes))
        return surplus

    def _surplus(self, num_bytes: int, max_bytes: int) -> int:
        """What must go until the low water, once the high water is passed; no limit is never passed."""
        is_full = num_bytes > self._limits.high_water * max_bytes > 0
        return int(num_bytes - self._limits.low_water * max_bytes) if is_full else 0

    def _settle(self, before: int | None) -> None:
        """Tells writers how much they may put, as far as everything that they had told of has been counted."""
        if self._limits.budget_bytes and self._census.is_current:
            room_bytes = self._limits.budget_bytes - int(self._gauges["used_bytes"])
            # A full server refuses this; it refuses what writers put, too.
            with contextlib.suppress(redis.exceptions.OutOfMemoryError):
                settle_room(self._payload, before, room_bytes)

    def _evict(self, namespaces: Iterable[IndexNames], surplus_bytes: int, costs: Mapping[str, float]) -> None:
        """Gives up what is worth least; the server frees what is unlinked in the background."""
        ledgers = [load_ledger(self._index, names) for names in namespaces]
        planned = plan(ledgers, surplus_bytes, _now_ms(), costs)
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
                if self._limits.budget_bytes and rows.num_bytes:
                    with contextlib.suppress(redis.exceptions.OutOfMemoryError):
                        self._payload.incrby(ROOM, rows.num_bytes)

    def _give_up(self, names: IndexNames, rows: RowsOf) -> None:
        if rows.is_empty:
            return
        self._editor.remove(names, rows)
        self._unlink(objects_of(names, rows))

    def _reconcile(self, names: IndexNames) -> None:
        """Removes rows whose objects the server has lost: by samples, more of them while many rows prove wrong."""
        for _ in range(_MAX_SAMPLES):
            checkpoints = sample_checkpoints(self._index, names, _SAMPLE)
            segments = sample_segments(self._index, names, _SAMPLE)
            self._editor.remove_unreadable(names, checkpoints.unreadable, segments.unreadable)
            self._counts["rows_unreadable"] += len(checkpoints.unreadable) + len(segments.unreadable)
            lost = find_lost(self._payload, names, RowsOf(checkpoints.rows, segments.rows))
            if not lost.is_empty:
                self._editor.remove(names, lost)
            self._counts["rows_reconciled_lost_object"] += len(lost)
            if 4 * len(lost) <= len(checkpoints.rows) + len(segments.rows):
                return

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


def _is_text(member: bytes) -> bool:
    return member.decode("utf-8", "ignore").encode() == member


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
