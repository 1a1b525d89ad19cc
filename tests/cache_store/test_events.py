"""The event stream from writers to an index, across gaps, restarts and an emptied server."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.event_applier import EventApplier
from warmstate.cache_store.event_follower import EventFollower
from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import (
    EventEntry,
    PrefixEvent,
    decode_entry,
    decode_lost_segments,
    encode_lost_segments,
)
from warmstate.cache_store.index_rows import StoredCheckpoint
from warmstate.cache_store.names import events_name, index_names, snapshot_name
from warmstate.cache_store.prefix_index import STORE_HOLDER, IndexRow, PrefixIndex, Tier
from warmstate.cache_store.redis_client import StoreAddress

Eventually = Callable[[Callable[[], bool]], None]

KEYS = [bytes([number]) * 32 for number in range(8)]


def added(number: int, tier: Tier = "host") -> PrefixEvent:
    return PrefixEvent("add", KEYS[number], 64 * (number + 1), tier)


def tell(log: EventLog, event: PrefixEvent) -> None:
    """Appends an event, with a row where it adds to the store."""
    is_row = event.is_of_store and event.op == "add"
    row = StoredCheckpoint(event.position, 1, 100, 0, None, event.key if event.position >= 256 else None, 1, 60, 1)
    log.append(event, row if is_row else None)


def removed(number: int, tier: Tier = "host") -> PrefixEvent:
    return PrefixEvent("remove", KEYS[number], 64 * (number + 1), tier)


@pytest.fixture
def namespace() -> bytes:
    return os.urandom(32)


@pytest.fixture
def follow() -> Iterator[Callable[[StoreAddress, bytes], tuple[EventFollower, PrefixIndex]]]:
    followers: list[EventFollower] = []

    def start(address: StoreAddress, namespace: bytes) -> tuple[EventFollower, PrefixIndex]:
        index = PrefixIndex()
        followers.append(EventFollower(address, namespace, index))
        return followers[-1], index

    yield start
    for follower in followers:
        follower.close()


@pytest.fixture
def write() -> Iterator[Callable[..., EventLog]]:
    logs: list[EventLog] = []

    def start(address: StoreAddress, namespace: bytes, replica_id: str, epoch: int = 1) -> EventLog:
        logs.append(EventLog(address, namespace, replica_id, epoch))
        return logs[-1]

    yield start
    for log in logs:
        log.close()


Follow = Callable[[StoreAddress, bytes], tuple[EventFollower, PrefixIndex]]
Write = Callable[..., EventLog]


def test_what_replicas_tell_reaches_an_index_that_came_before_and_one_that_comes_after(
    server: EmbeddedServer, namespace: bytes, follow: Follow, write: Write, eventually: Eventually
) -> None:
    _, early = follow(server.address, namespace)
    first, second = write(server.address, namespace, "a"), write(server.address, namespace, "b")
    for event in (added(0), added(1), removed(0), added(2, "store")):
        tell(first, event)
    second.append(added(1, "device"))
    expected = {"a": 128, "b": 128, STORE_HOLDER: 192}
    eventually(lambda: early.deepest(KEYS) == expected)
    assert early.find(KEYS[1], "b") == IndexRow(128, "device")
    follower, late = follow(server.address, namespace)
    assert follower.wait_caught_up(10)
    assert late.deepest(KEYS) == expected
    assert follower.stats()["event_gaps"] == 0


def test_namespaces_do_not_mix(
    server: EmbeddedServer, namespace: bytes, follow: Follow, write: Write, eventually: Eventually
) -> None:
    log = write(server.address, namespace, "a")
    tell(log, added(0))
    eventually(lambda: log.stats()["events_sent"] == 1)
    follower, index = follow(server.address, os.urandom(32))
    assert follower.wait_caught_up(10)
    assert len(index) == 0


def test_a_restarted_replica_loses_its_old_rows_and_the_store_keeps_its_own(
    server: EmbeddedServer, namespace: bytes, follow: Follow, write: Write, eventually: Eventually
) -> None:
    _, index = follow(server.address, namespace)
    old = write(server.address, namespace, "a", epoch=1)
    tell(old, added(0))
    tell(old, added(1, "store"))
    eventually(lambda: len(index) == 2)
    write(server.address, namespace, "a", epoch=2).append(added(2))
    eventually(lambda: index.deepest(KEYS) == {"a": 192, STORE_HOLDER: 128})
    tell(old, added(3))
    eventually(lambda: old.stats()["events_sent"] == 3)
    write(server.address, namespace, "b").append(added(4))
    eventually(lambda: "b" in index.holders())
    assert index.find(KEYS[3], "a") is None


def test_a_gap_drops_the_rows_of_that_replica_only() -> None:
    index = PrefixIndex()
    applier = EventApplier(index)
    for seq, replica_id, number in ((0, "a", 0), (0, "b", 0), (1, "a", 1), (1, "a", 5), (3, "a", 2)):
        applier.apply(EventEntry(replica_id, 1, seq, added(number)))
    assert index.deepest(KEYS) == {"a": 192, "b": 64}
    assert index.find(KEYS[0], "a") is None
    assert index.find(KEYS[5], "a") is None
    assert applier.num_gaps == 1


def test_a_restart_of_the_server_resets_indexes_and_replicas_tell_again_what_they_hold(
    start_server: Callable[..., EmbeddedServer],
    namespace: bytes,
    follow: Follow,
    write: Write,
    eventually: Eventually,
) -> None:
    server = start_server()
    follower, index = follow(server.address, namespace)
    log = write(server.address, namespace, "a")
    for event in (added(0), added(1), removed(1), added(2, "store")):
        tell(log, event)
    eventually(lambda: index.deepest(KEYS) == {"a": 64, STORE_HOLDER: 192})
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    tell(log, added(3))
    eventually(lambda: follower.stats()["follower_failures"] > 0)
    assert index.deepest(KEYS[:1]) == {"a": 64}
    start_server(port=server.port, password=server.password)
    eventually(lambda: index.deepest(KEYS) == {"a": 256} and index.find(KEYS[0], "a") is not None)
    assert follower.stats()["stream_resets"] == 1


def test_a_replica_with_nothing_new_to_tell_tells_a_restarted_server_what_it_holds(
    start_server: Callable[..., EmbeddedServer],
    namespace: bytes,
    follow: Follow,
    write: Write,
    eventually: Eventually,
) -> None:
    """It must not take an error to notice: the client connects anew by itself."""
    server = start_server()
    _, index = follow(server.address, namespace)
    log = write(server.address, namespace, "a")
    for number in range(3):
        log.append(added(number))
    eventually(lambda: index.deepest(KEYS) == {"a": 192})
    server.stop()
    start_server(port=server.port, password=server.password)
    eventually(lambda: len(index) == 0)
    eventually(lambda: index.deepest(KEYS) == {"a": 192} and len(index) == 3)


def test_what_comes_after_a_restart_brings_back_what_was_told_before(
    start_server: Callable[..., EmbeddedServer],
    namespace: bytes,
    follow: Follow,
    write: Write,
    eventually: Eventually,
) -> None:
    server = start_server()
    log = write(server.address, namespace, "a")
    tell(log, added(0))
    eventually(lambda: log.stats()["events_sent"] == 1)
    server.stop()
    start_server(port=server.port, password=server.password)
    tell(log, added(1))
    _, index = follow(server.address, namespace)
    eventually(lambda: {key for key in KEYS if index.find(key, "a")} == {KEYS[0], KEYS[1]})


def test_a_lost_stream_is_told_and_leaves_the_rows_of_other_streams(
    server: EmbeddedServer,
    connect: Callable[[StoreAddress], redis.Redis],
    namespace: bytes,
    write: Write,
    eventually: Eventually,
) -> None:
    index, resets = PrefixIndex(), []
    index.insert(KEYS[7], "of another namespace", IndexRow(512, "host"))
    follower = EventFollower(server.address, namespace, index, on_reset=lambda: resets.append(1))
    log = write(server.address, namespace, "a")
    for event in (added(0), added(1, "store")):
        tell(log, event)
    eventually(lambda: len(index) == 3)
    log.close()
    connect(server.address).unlink(*index_names(namespace).all(), snapshot_name("a"))
    eventually(lambda: resets == [1])
    follower.close()
    assert index.holders() == {"of another namespace": 1}


def test_rows_and_snapshots_stand_in_for_a_stream_that_is_lost_alone(
    server: EmbeddedServer,
    connect: Callable[[StoreAddress], redis.Redis],
    namespace: bytes,
    follow: Follow,
    write: Write,
    eventually: Eventually,
) -> None:
    follower, index = follow(server.address, namespace)
    log = write(server.address, namespace, "a")
    for event in (added(0), added(1, "store")):
        tell(log, event)
    eventually(lambda: len(index) == 2)
    connect(server.address).unlink(events_name(namespace))
    eventually(lambda: follower.stats()["stream_resets"] == 1)
    eventually(lambda: index.deepest(KEYS) == {"a": 64, STORE_HOLDER: 128})


def test_a_writer_never_waits_for_a_server_that_is_away(namespace: bytes, write: Write) -> None:
    log = write(StoreAddress("redis://127.0.0.1:1/0"), namespace, "a")
    for number in range(20_000):
        log.append(added(number % 8))
    assert log.stats()["events_lost"] == 10_000
    assert log.stats()["events_waiting"] == 10_000


def test_lost_kv_segments_are_told_and_leave_the_index_and_its_numbers_alone(
    server: EmbeddedServer, namespace: bytes, write: Write, eventually: Eventually
) -> None:
    index = PrefixIndex()
    lost: list[bytes] = []
    follower = EventFollower(server.address, namespace, index, on_lost_segments=lost.extend)
    assert follower.wait_caught_up(10)
    log = write(server.address, namespace, "a")
    tell(log, added(3, "store"))
    for number in (3, 7, 3):
        log.tell_lost_segment(KEYS[number])
    eventually(lambda: set(lost) == {KEYS[3], KEYS[7]})
    tell(log, added(0))
    eventually(lambda: index.deepest(KEYS) == {"a": 64, STORE_HOLDER: 256})
    assert follower.stats()["event_gaps"] == 0
    follower.close()


def test_lost_kv_segments_are_told_before_a_log_closes(
    server: EmbeddedServer, namespace: bytes, connect: Callable[[StoreAddress], redis.Redis]
) -> None:
    log = EventLog(server.address, namespace, "a", 1)
    log.tell_lost_segment(KEYS[3])
    log.close()
    client: Any = connect(server.address)
    ((_, fields),) = client.xrange(events_name(namespace))
    assert decode_lost_segments(fields) == [KEYS[3]]


def test_lost_kv_segments_that_wait_for_a_server_are_bounded(namespace: bytes, write: Write) -> None:
    log = write(StoreAddress("redis://127.0.0.1:1/0"), namespace, "a")
    for number in range(30_000):
        log.tell_lost_segment(number.to_bytes(32, "big"))
    # Ten thousand may wait, beside as many that are just being sent.
    assert log.stats()["events_lost"] >= 10_000


def test_hits_that_wait_for_a_server_are_bounded_however_often_sending_fails(
    start_server: Callable[..., EmbeddedServer], namespace: bytes, write: Write
) -> None:
    server = start_server()
    assert server.pid is not None
    log = write(replace(server.address, operation_timeout_s=0.3), namespace, "a")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        # With an event that waits, one attempt follows the other.
        tell(log, added(0))
        for number in range(60_000):
            log.count_hit(number.to_bytes(32, "big"))
            if number % 400 == 0:
                time.sleep(0.025)
        # Ten thousand wait; as many again may just be on their way.
        assert log.stats()["hits_lost"] >= 40_000
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_follower_hears_which_checkpoints_the_store_no_longer_holds(
    server: EmbeddedServer, namespace: bytes, write: Write, eventually: Eventually
) -> None:
    lost: list[tuple[bytes, int]] = []
    follower = EventFollower(
        server.address, namespace, PrefixIndex(), on_lost_checkpoint=lambda *checkpoint: lost.append(checkpoint)
    )
    assert follower.wait_caught_up(10)
    log = write(server.address, namespace, "a")
    for event in (added(3, "store"), added(4), removed(4), removed(3, "store")):
        tell(log, event)
    eventually(lambda: follower.stats()["events_read"] == 4)
    assert lost == [(KEYS[3], 256)]
    follower.close()


class WatchedKey(bytes):
    """Whenever the log's own thread looks at it, notes whether somebody else could use the log meanwhile."""

    log: EventLog
    was_free: list[bool]

    def __hash__(self) -> int:
        if threading.current_thread().name == "warmstate-events":
            other = threading.Thread(target=self.log.stats, daemon=True)
            other.start()
            other.join(2)
            self.was_free.append(not other.is_alive())
        return super().__hash__()


def test_nobody_waits_for_the_rows_of_a_snapshot(
    server: EmbeddedServer, namespace: bytes, eventually: Eventually
) -> None:
    log, key = EventLog(server.address, namespace, "a", 1, snapshot_period_s=0.0), WatchedKey(KEYS[0])
    key.log, key.was_free = log, []
    log.append(PrefixEvent("add", key, 64, "host"))
    eventually(lambda: len(key.was_free) > 1)
    assert all(key.was_free)
    log.close()


def test_entries_come_back_as_they_were_and_strangers_are_none() -> None:
    entry = EventEntry("a", 2**60, 5, removed(3, "store"))
    fields = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in entry.encode().items()
    }
    assert decode_entry(fields) == entry
    for name in fields:
        assert decode_entry({key: value for key, value in fields.items() if key != name}) is None
    assert decode_entry({**fields, b"t": b"moon"}) is None
    assert decode_entry({**fields, b"s": b"x"}) is None
    for position in (b"0", b"-64", b"32"):
        assert decode_entry({**fields, b"p": position}) is None
    assert decode_lost_segments(fields) == []


def test_an_entry_of_lost_kv_segments_is_none_to_whoever_asks_for_prefixes() -> None:
    fields = {name.encode(): value for name, value in encode_lost_segments(KEYS[:3]).items()}
    assert decode_lost_segments(fields) == KEYS[:3]
    assert decode_entry(fields) is None
    assert decode_lost_segments({b"lost": b"short"}) == []
