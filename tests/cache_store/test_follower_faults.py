"""A follower notices an emptied namespace under traffic, passes over what is corrupt, and comes back from any fault."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.event_follower import CHECK_PERIOD_S, EventFollower
from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import PrefixEvent
from warmstate.cache_store.index_rows import StoredCheckpoint
from warmstate.cache_store.names import REPLICA_IDS, index_names, snapshot_name
from warmstate.cache_store.prefix_index import STORE_HOLDER, PrefixIndex
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.replica_rows import ReplicaRow, ReplicaRows
from warmstate.cache_store.store_keeper import KeeperLimits, StoreKeeper
from warmstate.cache_store.store_survey import flush_namespace, summarise_namespace

Eventually = Callable[[Callable[[], bool]], None]
NOT_TEXT = b"replica\xff\xfe"


@pytest.fixture
def namespace() -> bytes:
    return os.urandom(32)


@pytest.fixture
def client(server: EmbeddedServer, connect: Callable[[StoreAddress], redis.Redis]) -> redis.Redis:
    return connect(server.address)


@pytest.fixture
def log(server: EmbeddedServer, namespace: bytes) -> Iterator[EventLog]:
    made = EventLog(server.address, namespace, "writer", 1)
    yield made
    made.close()


@pytest.fixture
def traffic(log: EventLog) -> Iterator[None]:
    """Events that leave no moment of rest."""
    ends = threading.Event()

    def tell() -> None:
        number = 0
        while not ends.wait(0.02):
            number += 1
            log.append(PrefixEvent("add", number.to_bytes(32, "big"), 64, "host"))

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    yield
    ends.set()
    thread.join()


def tell_stored(log: EventLog, key: bytes) -> None:
    log.append(PrefixEvent("add", key, 64, "store"), StoredCheckpoint(64, 1, 100, 0, None, None, 1, 60, 1))


def test_an_emptied_namespace_is_noticed_whatever_the_traffic(
    server: EmbeddedServer,
    client: redis.Redis,
    namespace: bytes,
    log: EventLog,
    traffic: None,
    eventually: Eventually,
) -> None:
    index, resets = PrefixIndex(), []
    follower = EventFollower(server.address, namespace, index, on_reset=lambda: resets.append(time.monotonic()))
    tell_stored(log, b"k" * 32)
    eventually(lambda: index.find(b"k" * 32, STORE_HOLDER) is not None)
    # Long enough for a look at the stream while it never rests.
    time.sleep(CHECK_PERIOD_S)
    flushed_at = time.monotonic()
    flush_namespace(client, client, index_names(namespace).short)
    eventually(lambda: resets != [])
    assert resets[0] - flushed_at < 3 * CHECK_PERIOD_S
    assert index.find(b"k" * 32, STORE_HOLDER) is None
    heard = follower.stats()["events_read"]
    eventually(lambda: follower.stats()["events_read"] > heard)
    follower.close()
    assert len(resets) == 1


def test_who_starts_waits_for_no_news_to_learn_that_there_are_none(server: EmbeddedServer) -> None:
    """A replica that starts waits for it."""
    times = []
    for _ in range(3):
        started = time.monotonic()
        follower = EventFollower(server.address, os.urandom(32), PrefixIndex())
        assert follower.wait_caught_up(5)
        times.append(time.monotonic() - started)
        follower.close()
    assert min(times) < 0.4


def test_what_is_no_replica_id_or_no_snapshot_is_counted_and_passed_over(
    server: EmbeddedServer, client: redis.Redis, namespace: bytes, log: EventLog, eventually: Eventually
) -> None:
    tell_stored(log, b"k" * 32)
    eventually(lambda: log.stats()["events_sent"] == 1)
    names = index_names(namespace)
    client.sadd(names.replicas, NOT_TEXT, "damaged")
    client.set(snapshot_name("damaged"), b"\xff" * 200, px=60_000)
    index = PrefixIndex()
    follower = EventFollower(server.address, namespace, index)
    assert follower.wait_caught_up(5)
    assert index.find(b"k" * 32, STORE_HOLDER) is not None
    stats = follower.stats()
    assert (stats["snapshots_unreadable"], stats["follower_failures"], stats["follower_alive"]) == (2, 0, 1)
    follower.close()
    assert summarise_namespace(client, names.short).checkpoints == 1
    keeper = StoreKeeper(server.address, server.address, "a", KeeperLimits(), 0.05)
    eventually(lambda: NOT_TEXT not in client.smembers(names.replicas))
    assert keeper.stats()["thread_alive"] == 1
    keeper.close()


def test_what_is_no_replica_id_hides_no_replica(server: EmbeddedServer, client: redis.Redis) -> None:
    rows = ReplicaRows(server.address)
    rows.write(ReplicaRow("a", 1, "ready", 1.0))
    client.sadd(REPLICA_IDS, NOT_TEXT)
    assert list(rows.read()) == ["a"]
    assert client.smembers(REPLICA_IDS) == {b"a"}
    rows.delete("a")
    rows.close()


def test_a_follower_comes_back_from_a_fault_of_any_kind_and_shows_it(
    server: EmbeddedServer,
    namespace: bytes,
    log: EventLog,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = [ValueError("one"), ValueError("two")]
    heard: list[bytes] = []

    def fail_at_first(keys: Sequence[bytes]) -> None:
        if faults:
            raise faults.pop()
        heard.extend(keys)

    index = PrefixIndex()
    follower = EventFollower(server.address, namespace, index, on_lost_segments=fail_at_first)
    assert follower.wait_caught_up(5)
    tell_stored(log, b"k" * 32)
    log.tell_lost_segment(b"s" * 32)
    eventually(lambda: follower.stats()["follower_alive"] == 0)
    eventually(lambda: not faults or follower.stats()["follower_alive"] == 1)
    log.tell_lost_segment(b"t" * 32)
    eventually(lambda: not faults)
    log.tell_lost_segment(b"u" * 32)
    eventually(lambda: b"u" * 32 in heard)
    eventually(lambda: follower.stats()["follower_alive"] == 1)
    assert index.find(b"k" * 32, STORE_HOLDER) is not None
    assert follower.stats()["follower_failures"] == 2
    assert {record.name for record in caplog.records if record.levelname == "ERROR"} == {EventFollower.__module__}
    follower.close()
