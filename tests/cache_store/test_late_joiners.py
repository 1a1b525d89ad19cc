"""A router that joins late, or finds the stream trimmed, knows what one from the beginning knows; on every server."""

import os
from collections.abc import Callable, Iterator

import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.event_follower import EventFollower
from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import PrefixEvent
from warmstate.cache_store.index_loader import read_namespaces, scan_checkpoints, scan_numbers, scan_segments
from warmstate.cache_store.index_rows import StoredCheckpoint, StoredSegment
from warmstate.cache_store.names import index_names, snapshot_name
from warmstate.cache_store.prefix_index import STORE_HOLDER, PrefixIndex, Tier
from warmstate.cache_store.redis_client import StoreAddress

Eventually = Callable[[Callable[[], bool]], None]
Write = Callable[..., EventLog]
Follow = Callable[[bytes], tuple[EventFollower, PrefixIndex]]
Connect = Callable[[StoreAddress], redis.Redis]

KEYS = [bytes([number]) * 32 for number in range(200)]


def tell(log: EventLog, op: str, number: int, tier: Tier = "host") -> None:
    position = 64 * (number % 100 + 1)
    event = PrefixEvent("add" if op == "add" else "remove", KEYS[number], position, tier)
    segment_key = b"s" * 32 if position >= 256 else None
    row = StoredCheckpoint(position, 1, 1000, 0, None, segment_key, 5, 60, 1, "kind")
    segments = {segment_key: StoredSegment(256, 500, None, 5, 60, 1)} if segment_key else {}
    is_row = tier == "store" and op == "add"
    log.append(event, row if is_row else None, segments if is_row else None)


def known(index: PrefixIndex) -> dict[str, set[int]]:
    holders = index.holders()
    return {
        holder: {number for number, key in enumerate(KEYS) if index.find(key, holder) is not None} for holder in holders
    }


@pytest.fixture
def namespace() -> bytes:
    return os.urandom(32)


@pytest.fixture
def follow(each_server: EmbeddedServer) -> Iterator[Follow]:
    followers: list[EventFollower] = []

    def start(namespace: bytes) -> tuple[EventFollower, PrefixIndex]:
        index = PrefixIndex()
        followers.append(EventFollower(each_server.address, namespace, index))
        return followers[-1], index

    yield start
    for follower in followers:
        follower.close()


@pytest.fixture
def write(each_server: EmbeddedServer, namespace: bytes) -> Iterator[Write]:
    logs: list[EventLog] = []

    def start(replica_id: str, epoch: int = 1, snapshot_period_s: float = 30.0) -> EventLog:
        logs.append(EventLog(each_server.address, namespace, replica_id, epoch, snapshot_period_s=snapshot_period_s))
        return logs[-1]

    yield start
    for log in logs:
        log.close()


def test_a_router_that_joins_in_the_middle_knows_what_one_from_the_beginning_knows(
    namespace: bytes, follow: Follow, write: Write, eventually: Eventually
) -> None:
    _, early = follow(namespace)
    first, second = write("a", snapshot_period_s=0.2), write("b")
    for number in range(100):
        tell(first, "add", number, "store" if number % 3 else "host")
        tell(second, "add", number + 100, "device")
        if number % 4 == 0:
            tell(first, "remove", number, "store" if number % 3 else "host")
    eventually(lambda: first.stats()["snapshots_written"] >= 3)
    for number in range(1, 100, 5):
        tell(second, "remove", number + 100, "device")
    eventually(lambda: second.stats()["events_waiting"] == 0)
    for number in range(2, 100, 5):
        tell(first, "remove", number, "store" if number % 3 else "host")
    eventually(lambda: first.stats()["events_waiting"] == 0)
    follower, late = follow(namespace)
    assert follower.wait_caught_up(10)
    eventually(lambda: known(early) == known(late))
    assert set(known(late)) == {"a", "b", STORE_HOLDER}
    assert follower.stats()["rows_loaded"] > 0


def test_old_roots_are_known_after_the_stream_was_trimmed(
    each_server: EmbeddedServer,
    namespace: bytes,
    follow: Follow,
    write: Write,
    connect: Connect,
    eventually: Eventually,
) -> None:
    first = write("a", snapshot_period_s=0.2)
    tell(first, "add", 0)
    tell(first, "add", 1, "store")
    eventually(lambda: first.stats()["snapshots_written"] >= 3)
    tell(first, "add", 2)
    eventually(lambda: first.stats()["events_waiting"] == 0)
    client = connect(each_server.address)
    client.xtrim(index_names(namespace).events, maxlen=1, approximate=False)
    _, late = follow(namespace)
    eventually(lambda: known(late) == {"a": {0, 2}, STORE_HOLDER: {1}})


def test_a_reader_that_missed_entries_takes_the_next_snapshot_for_them(
    each_server: EmbeddedServer,
    namespace: bytes,
    follow: Follow,
    write: Write,
    connect: Connect,
    eventually: Eventually,
) -> None:
    follower, index = follow(namespace)
    log = write("a", snapshot_period_s=1.0)
    tell(log, "add", 0)
    eventually(lambda: known(index) == {"a": {0}})
    # An entry of the replica's own that jumps ahead: what a trimmed stream looks like to a slow reader.
    lost = {"r": "a", "e": 1, "s": 5, "o": "add", "h": KEYS[9], "p": 640, "t": "host"}
    connect(each_server.address).xadd(index_names(namespace).events, lost)  # type: ignore[arg-type]
    eventually(lambda: follower.stats()["replicas_incomplete"] == 1)
    for number in range(1, 8):
        tell(log, "add", number)
    eventually(lambda: follower.stats()["replicas_incomplete"] == 0)
    eventually(lambda: known(index)["a"] >= {0, 1, 2, 3, 4, 5, 6, 7})
    assert follower.stats()["event_gaps"] == 1


def test_the_rows_are_the_sum_of_the_events_and_say_what_was_told(
    each_server: EmbeddedServer, namespace: bytes, write: Write, connect: Connect, eventually: Eventually
) -> None:
    log, names = write("a"), index_names(namespace)
    for number in (1, 2, 8):
        tell(log, "add", number, "store")
    log.count_hit(KEYS[2])
    log.count_hit(KEYS[2])
    tell(log, "remove", 8, "store")
    log.count_hit(KEYS[1])
    client = connect(each_server.address)
    eventually(lambda: log.stats()["hits_told"] == 3 and log.stats()["events_waiting"] == 0)
    rows = scan_checkpoints(client, names)
    assert rows.keys() == {KEYS[1], KEYS[2]}
    assert rows[KEYS[1]] == StoredCheckpoint(128, 1, 1000, 0, None, None, 5, 60, 1, "kind")
    assert scan_segments(client, names) == {b"s" * 32: StoredSegment(256, 500, None, 5, 60, 1)}
    assert scan_numbers(client, names.hits) == {KEYS[2]: 2, KEYS[1]: 1}
    assert scan_numbers(client, names.uses).keys() == {KEYS[1], KEYS[2]}
    assert read_namespaces(client)[names.short][0] == namespace.hex()


def test_what_lies_in_the_index_and_is_no_row_is_left_out(
    each_server: EmbeddedServer,
    namespace: bytes,
    follow: Follow,
    write: Write,
    connect: Connect,
    eventually: Eventually,
) -> None:
    log, names = write("a"), index_names(namespace)
    tell(log, "add", 1, "store")
    eventually(lambda: log.stats()["snapshots_written"] == 1 and log.stats()["events_sent"] == 1)
    client = connect(each_server.address)
    client.hset(names.checkpoints, KEYS[5], b"rubbish")
    client.hset(names.checkpoints, b"short", b"\1" * 103)
    client.set(snapshot_name("a"), b"rubbish")
    client.hset(names.hits, KEYS[5], b"many")
    follower, index = follow(namespace)
    assert follower.wait_caught_up(10)
    assert known(index) == {STORE_HOLDER: {1}}
    assert scan_numbers(client, names.hits) == {}


def test_index_keys_do_not_expire_and_those_of_a_replica_do(
    each_server: EmbeddedServer, namespace: bytes, write: Write, connect: Connect, eventually: Eventually
) -> None:
    """A volatile-* policy evicts only what expires."""
    log, names = write("a"), index_names(namespace)
    tell(log, "add", 5, "store")
    log.count_hit(KEYS[5])
    eventually(lambda: log.stats()["hits_told"] == 1 and log.stats()["snapshots_written"] == 1)
    client = connect(each_server.address)
    present = [name for name in names.all() if client.exists(name)]
    assert len(present) == 6
    assert [client.pttl(name) for name in present] == 6 * [-1]
    assert 0 < client.pttl(snapshot_name("a")) <= 100_000
