"""What one replica does for all: eviction, and clearing away what is lost or dead; on every server."""

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.event_follower import EventFollower
from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import PrefixEvent
from warmstate.cache_store.index_loader import scan_checkpoints, scan_segments
from warmstate.cache_store.index_rows import ROW_VERSION, StoredCheckpoint, StoredSegment
from warmstate.cache_store.names import LEASE, NAMESPACES, IndexNames, checkpoint_names, index_names, segment_name
from warmstate.cache_store.orphans import OrphanSearch
from warmstate.cache_store.prefix_index import PrefixIndex
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.replica_rows import PREFILL_RATE, ReplicaRow, ReplicaRows
from warmstate.cache_store.store_keeper import KeeperLimits, StoreKeeper

Eventually = Callable[[Callable[[], bool]], None]
Connect = Callable[[StoreAddress], redis.Redis]
Start = Callable[..., EmbeddedServer]

# Just below what allocators round up to, so that rows and memory agree.
CHECKPOINT_BYTES = 1_020_000
SEGMENT_BYTES = 260_000
NUM_GROUPS = 2


class Shelf:
    """Puts checkpoints and their KV into a store as a replica does: objects first, then rows."""

    def __init__(self, address: StoreAddress, client: redis.Redis, namespace: bytes) -> None:
        self.address = address
        self.client = client
        self.namespace = namespace
        self.names = index_names(namespace)
        self.log = EventLog(address, namespace, "writer", 1)
        self._segments: set[bytes] = set()

    def key(self, conversation: str, position: int) -> bytes:
        """Conversations share their prefixes as far as their names do, 256 tokens per letter."""
        shared = conversation[: max(1, -(-position // 256))]
        return hashlib.sha256(f"{shared}{position}".encode()).digest()

    def put(self, conversation: str, position: int, parent: int = 0) -> bytes:
        key, new = self.key(conversation, position), {}
        for stop in range(256, position + 1, 256):
            segment = self.key(conversation, stop)
            if segment in self._segments:
                continue
            self._segments.add(segment)
            self.client.set(segment_name(self.names, segment), os.urandom(SEGMENT_BYTES), px=3_600_000)
            above = self.key(conversation, stop - 256) if stop > 256 else None
            new[segment] = StoredSegment(stop, SEGMENT_BYTES, above, now_ms(), 3600, 1)
        for name in checkpoint_names(self.names, key, NUM_GROUPS):
            self.client.hset(name, "m", os.urandom(CHECKPOINT_BYTES // NUM_GROUPS))
            self.client.pexpire(name, 3_600_000)
        row = StoredCheckpoint(
            position,
            NUM_GROUPS,
            CHECKPOINT_BYTES,
            parent,
            self.key(conversation, parent) if parent else None,
            self.key(conversation, position // 256 * 256) if position >= 256 else None,
            now_ms(),
            3600,
            1,
        )
        self.log.append(PrefixEvent("add", key, position, "store"), row, new)
        return key

    def told(self) -> None:
        while self.log.stats()["events_waiting"] or not self.log.stats()["snapshots_written"]:
            time.sleep(0.01)

    def rows(self) -> set[bytes]:
        return set(scan_checkpoints(self.client, self.names))

    def is_whole(self, key: bytes) -> bool:
        return self.client.exists(*checkpoint_names(self.names, key, NUM_GROUPS)) == NUM_GROUPS

    def segments_here(self) -> set[bytes]:
        return {key for key in self._segments if self.client.exists(segment_name(self.names, key))}

    def own_share(self, budget_bytes: int) -> float:
        """How much of a budget is taken by what is ours, but for the index, which is small here."""
        rows = (scan_checkpoints(self.client, self.names), scan_segments(self.client, self.names))
        return sum(row.num_bytes for each in rows for row in each.values()) / budget_bytes

    def used_share(self, budget_bytes: int) -> float:
        return float(self.client.info("memory")["used_memory"]) / budget_bytes


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture
def server(each_binary: Path, start_server: Start) -> EmbeddedServer:
    return start_server(max_memory_bytes=256 << 20, binary=each_binary)


@pytest.fixture
def client(server: EmbeddedServer, connect: Connect) -> redis.Redis:
    return connect(server.address)


@pytest.fixture
def make_shelf(server: EmbeddedServer, client: redis.Redis) -> Iterator[Callable[[], Shelf]]:
    shelves: list[Shelf] = []

    def make() -> Shelf:
        shelves.append(Shelf(server.address, client, os.urandom(32)))
        return shelves[-1]

    yield make
    for shelf in shelves:
        shelf.log.close()


@pytest.fixture
def shelf(make_shelf: Callable[[], Shelf]) -> Shelf:
    return make_shelf()


@pytest.fixture
def keep(server: EmbeddedServer) -> Iterator[Callable[..., StoreKeeper]]:
    keepers: list[StoreKeeper] = []

    def start(candidate: str = "a", payload: StoreAddress | None = None, **limits: float) -> StoreKeeper:
        ttl_ms = int(limits.pop("lease_ttl_ms", 15_000))
        grace_s = limits.pop("orphan_grace_s", 60.0)
        chosen = KeeperLimits(**limits)  # type: ignore[arg-type]
        keepers.append(StoreKeeper(server.address, payload or server.address, candidate, chosen, 0.1, ttl_ms, grace_s))
        return keepers[-1]

    yield start
    for keeper in keepers:
        keeper.close()


Keep = Callable[..., StoreKeeper]


def test_what_is_worth_least_goes_before_the_server_must_evict(
    server: EmbeddedServer, shelf: Shelf, keep: Keep, eventually: Eventually
) -> None:
    keys = [shelf.put(letter, 320) for letter in "abcdefghijklmnopqrst"]
    for _ in range(50):
        shelf.log.count_hit(keys[3])
    eventually(lambda: shelf.log.stats()["hits_told"] == 50)
    shelf.told()
    budget = 24 << 20
    assert shelf.own_share(budget) > 0.85
    index = PrefixIndex()
    follower = EventFollower(server.address, bytes.fromhex(_digest(shelf)), index)
    assert follower.wait_caught_up(10)
    keeper = keep(budget_bytes=budget)
    eventually(lambda: shelf.own_share(budget) < 0.82)
    eventually(lambda: keeper.stats()["rounds"] > 3)
    left = shelf.rows()
    assert keys[3] in left
    assert len(left) == 15
    assert all(shelf.is_whole(key) == (key in left) for key in keys)
    assert len(shelf.segments_here()) == len(left)
    assert set(scan_segments(shelf.client, shelf.names)) == shelf.segments_here()
    eventually(lambda: index.holders()["store"] == len(left))
    stats = keeper.stats()
    assert stats["evictions_budget"] == 20 - len(left)
    assert stats["evictions_orphan_kv"] == 20 - len(left)
    assert stats["evicted_bytes"] == (20 - len(left)) * (CHECKPOINT_BYTES + SEGMENT_BYTES)
    assert (stats["lease_held"], stats["budget_bytes"]) == (1, budget)
    # One checkpoint more would have been too many.
    assert 0.75 < stats["used_bytes"] / budget <= 0.8
    assert stats["rows"] == 2 * len(left)
    assert 0 < stats["index_bytes"] < 1 << 20
    follower.close()


def test_a_store_that_became_full_between_two_looks_is_emptied_all_the_same(
    server: EmbeddedServer, shelf: Shelf, keep: Keep, eventually: Eventually
) -> None:
    """Without any policy a full server refuses all writes, those of the index too."""
    keeper = keep()
    for letter in "abcdefghij":
        shelf.put(letter, 320)
    shelf.told()
    eventually(lambda: keeper.stats()["rounds"] > 2)
    shelf.client.config_set("maxmemory-policy", "noeviction")
    budget = int(shelf.used_share(1)) - 1_000_000
    shelf.client.config_set("maxmemory", budget)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        shelf.client.set("x", b"x")
    eventually(lambda: shelf.used_share(budget) < 0.82)
    assert 0 < len(shelf.rows()) < 10
    shelf.client.set("x", b"x")
    key = shelf.put("z", 320)
    shelf.told()
    assert key in shelf.rows()


def test_kv_stays_while_a_checkpoint_needs_it_and_goes_with_the_last(
    shelf: Shelf, keep: Keep, eventually: Eventually
) -> None:
    shared, deep = shelf.put("ab", 256), shelf.put("abc", 768, parent=256)
    other = shelf.put("abd", 704, parent=256)
    for _ in range(100):
        shelf.log.count_hit(deep)
    eventually(lambda: shelf.log.stats()["hits_told"] == 100)
    shelf.told()
    keep(budget_bytes=int(shelf.own_share(1)) - 1_000_000, high_water=0.99, low_water=0.9)
    eventually(lambda: not shelf.is_whole(other))
    needed = {shelf.key("abc", stop) for stop in (256, 512, 768)}
    assert shelf.rows() == {deep}
    assert shelf.is_whole(deep)
    assert not shelf.is_whole(shared)
    assert shelf.segments_here() == needed


def test_of_two_keepers_one_works_and_the_other_follows_it(shelf: Shelf, keep: Keep, eventually: Eventually) -> None:
    for letter in "abcdefghijklmnopqrst":
        shelf.put(letter, 320)
    shelf.told()
    budget = 24 << 20
    keepers = {name: keep(name, budget_bytes=budget) for name in ("a", "b")}
    eventually(lambda: shelf.own_share(budget) < 0.82)
    eventually(lambda: sum(keeper.stats()["rounds"] for keeper in keepers.values()) > 5)
    held = {name: keeper.stats()["lease_held"] for name, keeper in keepers.items()}
    assert sorted(held.values()) == [0, 1]
    holder, standby = sorted(keepers.values(), key=lambda keeper: keeper.stats()["lease_held"], reverse=True)
    assert standby.stats()["rounds"] == standby.stats()["evicted_bytes"] == 0
    # No more than was needed: one holder's work, not two.
    assert shelf.own_share(budget) > 0.72
    holder.close()
    eventually(lambda: standby.stats()["rounds"] > 0)


def test_rows_of_what_the_server_lost_disappear_without_anybody_asking(
    shelf: Shelf, keep: Keep, eventually: Eventually
) -> None:
    keys = [shelf.put(letter, 320) for letter in "abcdefghij"]
    shelf.told()
    for key in keys[:7]:
        shelf.client.unlink(checkpoint_names(shelf.names, key, NUM_GROUPS)[0])
    shelf.client.unlink(segment_name(shelf.names, shelf.key("j", 256)))
    keeper = keep()
    eventually(lambda: shelf.rows() == set(keys[7:]))
    eventually(lambda: len(scan_segments(shelf.client, shelf.names)) == 9)
    assert keeper.stats()["rows_reconciled_lost_object"] == 8
    assert keeper.stats()["evicted_bytes"] == 0


def test_what_a_lost_segment_makes_useless_goes_with_it_and_nothing_else(
    shelf: Shelf, keep: Keep, eventually: Eventually
) -> None:
    """A checkpoint without its KV is a row that makes readers fetch for nothing."""
    shallow, deep, other = shelf.put("ab", 256), shelf.put("abcd", 1024, parent=256), shelf.put("xyz", 768)
    shelf.told()
    shelf.client.unlink(segment_name(shelf.names, shelf.key("abcd", 512)))
    keeper = keep(orphan_grace_s=0.0)
    eventually(lambda: shelf.rows() == {shallow, other})
    left = {shelf.key("ab", 256), *(shelf.key("xyz", stop) for stop in (256, 512, 768))}
    eventually(lambda: set(scan_segments(shelf.client, shelf.names)) == left == shelf.segments_here())
    assert not shelf.client.exists(*checkpoint_names(shelf.names, deep, NUM_GROUPS))
    assert shelf.is_whole(shallow)
    assert shelf.is_whole(other)
    reasons = {name: n for name, n in keeper.stats().items() if name.startswith("rows_reconciled")}
    assert reasons == {"rows_reconciled_lost_object": 1, "rows_reconciled_lost_kv": 1, "rows_reconciled_unneeded_kv": 2}
    assert keeper.stats()["evicted_bytes"] == 0


def test_of_two_namespaces_the_one_that_is_cheaper_to_compute_goes_first(
    server: EmbeddedServer, make_shelf: Callable[[], Shelf], keep: Keep, eventually: Eventually
) -> None:
    cheap, dear = make_shelf(), make_shelf()
    rows = ReplicaRows(server.address)
    for shelf, rate in ((cheap, 4000.0), (dear, 200.0)):
        rows.write(ReplicaRow(shelf.names.short, 1, "ready", 1.0, "", shelf.namespace.hex(), {PREFILL_RATE: rate}))
    # Those put first would go first if all cost the same.
    for shelf in (dear, cheap):
        for letter in "abcdefgh":
            shelf.put(letter, 320)
        shelf.told()
        time.sleep(0.01)
    budget = 18 << 20
    keep(budget_bytes=budget)
    eventually(lambda: cheap.own_share(budget) + dear.own_share(budget) < 0.8)
    assert len(dear.rows()) == 8
    assert len(cheap.rows()) < 8
    costs = {shelf.names.short: float(server_value(shelf)) for shelf in (cheap, dear)}
    assert costs == {cheap.names.short: 0.25, dear.names.short: 5.0}
    rows.close()


def server_value(shelf: Shelf) -> bytes:
    value = shelf.client.get(shelf.names.cost)
    assert isinstance(value, bytes)
    return value


def test_replicas_are_told_of_lost_and_of_ownerless_kv(shelf: Shelf, keep: Keep, eventually: Eventually) -> None:
    """They put no segment that they have lately seen, and would tell of checkpoints whose KV is not there."""
    shelf.put("ab", 512)
    shelf.told()
    told: list[bytes] = []
    follower = EventFollower(shelf.address, bytes.fromhex(_digest(shelf)), PrefixIndex(), on_lost_segments=told.extend)
    assert follower.wait_caught_up(10)
    shelf.client.unlink(segment_name(shelf.names, shelf.key("ab", 256)))
    shelf.client.set(segment_name(shelf.names, b"o" * 32), b"x")
    keep(orphan_grace_s=0.0)
    eventually(lambda: set(told) == {shelf.key("ab", 256), shelf.key("ab", 512), b"o" * 32})
    follower.close()


def test_a_keeper_that_fails_says_so_and_gives_up_the_lease(
    shelf: Shelf, keep: Keep, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.put("a", 320)
    shelf.told()
    keeper = keep()
    eventually(lambda: keeper.stats()["rounds"] > 0)
    assert keeper.stats()["thread_alive"] == 1
    shelf.client.set(shelf.names.fence, "no number")
    eventually(lambda: keeper.stats()["thread_alive"] == 0)
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.exc_info is not None
    assert not shelf.client.exists(LEASE)


def test_without_a_budget_and_a_maxmemory_nothing_is_evicted(
    each_binary: Path, start_server: Start, connect: Connect, eventually: Eventually
) -> None:
    server = start_server(max_memory_bytes=0, binary=each_binary)
    shelf = Shelf(server.address, connect(server.address), os.urandom(32))
    key = shelf.put("a", 320)
    shelf.told()
    keeper = StoreKeeper(server.address, server.address, "a", KeeperLimits(), 0.05)
    eventually(lambda: keeper.stats()["rounds"] > 3)
    assert shelf.rows() == {key}
    assert keeper.stats()["budget_bytes"] == 0
    keeper.close()
    shelf.log.close()


def test_rows_that_cannot_be_read_are_removed_unless_a_newer_version_wrote_them(
    shelf: Shelf, keep: Keep, eventually: Eventually
) -> None:
    key = shelf.put("a", 320)
    shelf.told()
    newer = bytes([ROW_VERSION + 1]) + b"whatever"
    shelf.client.hset(shelf.names.checkpoints, mapping={b"x" * 32: b"\1rubbish", b"y" * 32: newer})
    shelf.client.hset(shelf.names.segments, b"z" * 32, b"")
    keeper = keep()
    eventually(lambda: keeper.stats()["rows_unreadable"] == 2)
    assert set(shelf.client.hkeys(shelf.names.checkpoints)) == {key, b"y" * 32}
    assert shelf.client.hlen(shelf.names.segments) == 1


def test_the_same_prefix_in_two_namespaces_is_two_things(
    make_shelf: Callable[[], Shelf], keep: Keep, eventually: Eventually
) -> None:
    used, unused = make_shelf(), make_shelf()
    keys = [(used.put(letter, 320), unused.put(letter, 320)) for letter in "abcdefgh"]
    for key, _ in keys:
        for _ in range(20):
            used.log.count_hit(key)
    eventually(lambda: used.log.stats()["hits_told"] == 160)
    used.told()
    unused.told()
    budget = 18 << 20
    keep(budget_bytes=budget)
    eventually(lambda: used.own_share(budget) + unused.own_share(budget) < 0.8)
    assert used.rows() == {key for key, _ in keys}
    assert len(unused.rows()) < 8


def test_a_namespace_that_nobody_speaks_for_is_cleared_away(
    make_shelf: Callable[[], Shelf], keep: Keep, eventually: Eventually
) -> None:
    living, dead = make_shelf(), make_shelf()
    for shelf in (living, dead):
        shelf.put("a", 320)
        shelf.told()
    dead.log.close()
    client = dead.client
    client.hset(NAMESPACES, dead.names.short, f"{_digest(dead)} {now_ms() - 7_200_000}")
    keeper = keep(dead_after_s=3600)
    eventually(lambda: keeper.stats()["namespaces_forgotten"] == 1)
    assert not client.exists(*dead.names.all())
    assert client.hkeys(NAMESPACES) == [living.names.short.encode()]
    assert len(living.rows()) == 1


def test_what_is_used_lives_on_with_the_kv_it_needs_and_nothing_else_does(
    shelf: Shelf, keep: Keep, eventually: Eventually
) -> None:
    shallow, deep, other = shelf.put("ab", 320), shelf.put("abc", 832, parent=320), shelf.put("xyz", 832)
    shelf.told()
    names = [name.decode() for name in shelf.client.scan_iter(match="ws:{*.*.*}:*")]
    for name in names:
        shelf.client.pexpire(name, 100_000)
    shelf.log.count_hit(deep)
    keeper = keep()
    eventually(lambda: keeper.stats()["checkpoints_renewed"] == 1)
    eventually(lambda: keeper.stats()["rounds"] > 2)
    renewed = {name for name in names if shelf.client.pttl(name) > 3_000_000}
    segments = [segment_name(shelf.names, shelf.key("abc", stop)) for stop in (256, 512, 768)]
    assert renewed == {*checkpoint_names(shelf.names, deep, NUM_GROUPS), *segments}
    assert {shallow, deep, other} == shelf.rows()


def test_dead_replicas_are_taken_off_the_list(shelf: Shelf, keep: Keep, eventually: Eventually) -> None:
    shelf.put("a", 320)
    shelf.told()
    shelf.client.sadd(shelf.names.replicas, "dead")
    keep()
    eventually(lambda: shelf.client.smembers(shelf.names.replicas) == {b"writer"})


def test_objects_without_rows_go_after_a_while_and_temporaries_stay(shelf: Shelf, client: redis.Redis) -> None:
    """What a writer leaves that dies between its objects and its row."""
    key = shelf.put("a", 320)
    shelf.told()
    now = [0.0]
    search = OrphanSearch(client, client, grace_s=60, clock=lambda: now[0])
    orphans = {*checkpoint_names(shelf.names, b"o" * 32, 2), segment_name(shelf.names, b"p" * 32)}
    for name in orphans:
        client.set(name, b"x")
    late = segment_name(shelf.names, b"q" * 32)
    client.set(late, b"x")
    client.set(f"ws:{{{shelf.names.short}.{'00' * 32}.0}}:tmp:0123456789abcdef", b"x")
    client.set("somebody else's", b"x")
    assert [search.find() for _ in range(3)] == [[], [], []]
    row = StoredSegment(256, 1, None, 0, 1, 1)
    client.hset(shelf.names.segments, b"q" * 32, row.encode())
    now[0] = 61.0
    assert {str(name) for name in search.find()} == orphans
    assert shelf.is_whole(key)


def test_a_dead_payload_server_stops_the_keeper_only_while_it_is_dead(
    each_binary: Path, shelf: Shelf, start_server: Start, keep: Keep, eventually: Eventually
) -> None:
    payload = start_server(max_memory_bytes=64 << 20, binary=each_binary)
    key = shelf.put("a", 320)
    shelf.told()
    assert payload.pid is not None
    os.kill(payload.pid, signal.SIGKILL)
    keeper = keep(payload=payload.address)
    eventually(lambda: keeper.stats()["failures"] > 1)
    assert shelf.rows() == {key}
    payload.stop()
    start_server(max_memory_bytes=64 << 20, port=payload.port, password=payload.password, binary=each_binary)
    eventually(lambda: keeper.stats()["rounds"] > 1)
    assert shelf.rows() == set()


def test_a_dead_index_server_stops_the_keeper_only_while_it_is_dead(
    each_binary: Path, server: EmbeddedServer, start_server: Start, keep: Keep, eventually: Eventually
) -> None:
    keeper = keep(lease_ttl_ms=500)
    eventually(lambda: keeper.stats()["rounds"] > 1)
    server.stop()
    eventually(lambda: keeper.stats()["failures"] > 1)
    eventually(lambda: keeper.stats()["lease_held"] == 0)
    start_server(max_memory_bytes=64 << 20, port=server.port, password=server.password, binary=each_binary)
    rounds = keeper.stats()["rounds"]
    eventually(lambda: keeper.stats()["rounds"] > rounds + 1)


def _digest(shelf: Shelf) -> str:
    value = shelf.client.hget(NAMESPACES, shelf.names.short)
    assert isinstance(value, bytes)
    return value.decode().split()[0]


def test_the_names_of_a_namespace_share_a_slot(shelf: Shelf) -> None:
    tags = {name[name.index("{") : name.index("}") + 1] for name in shelf.names.all()}
    assert tags == {f"{{{shelf.names.short}}}"}
    assert isinstance(shelf.names, IndexNames)
