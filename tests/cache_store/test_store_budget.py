"""`budget_bytes` holds at every moment, over all writers, and counts nothing but what is ours."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import PrefixEvent
from warmstate.cache_store.index_loader import scan_checkpoints
from warmstate.cache_store.index_rows import StoredCheckpoint
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.names import index_names
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.room import read_room
from warmstate.cache_store.store import Dropped, DropReason, Exists, Part, Ready, Stored
from warmstate.cache_store.store_keeper import KeeperLimits, StoreKeeper

Run = Callable[[Awaitable[Any]], Any]
MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
Eventually = Callable[[Callable[[], bool]], None]

BUDGET = 12 << 20
OBJECT_BYTES = 1_000_000


@pytest.fixture
def server(start_server: Callable[..., EmbeddedServer]) -> EmbeddedServer:
    return start_server(max_memory_bytes=512 << 20)


@pytest.fixture
def client(server: EmbeddedServer, connect: Callable[[StoreAddress], redis.Redis]) -> redis.Redis:
    return connect(server.address)


@pytest.fixture
def parts(make_parts: MakeParts) -> dict[str, Part]:
    return make_parts(rec=("uint8", (OBJECT_BYTES,)))


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_what_would_pass_the_budget_is_refused_over_all_writers(
    server: EmbeddedServer, client: redis.Redis, run: Run, make_key: MakeKey, parts: dict[str, Part], kind: str
) -> None:
    stores = [RedisStore(server.address, budget_bytes=BUDGET) for _ in range(2)]
    outcomes = [run(stores[number % 2].put(make_key(kind), parts)) for number in range(40)]
    assert [type(outcome) for outcome in outcomes] == [Stored] * 12 + [Dropped] * 28
    assert {outcome.reason for outcome in outcomes[12:]} == {DropReason.NO_ROOM}
    # Allocators round up.
    assert sum(client.memory_usage(name) or 0 for name in client.scan_iter(match="ws:{*.*.*}:*")) < 1.1 * BUDGET
    for store in stores:
        run(store.close())


def test_what_is_there_already_takes_no_room(
    server: EmbeddedServer, client: redis.Redis, run: Run, make_key: MakeKey, parts: dict[str, Part]
) -> None:
    store, other = (RedisStore(server.address, budget_bytes=BUDGET) for _ in range(2))

    async def both(key: ObjectKey) -> list[Any]:
        return list(await asyncio.gather(store.put(key, parts), other.put(key, parts)))

    for number in range(1, 11):
        key = make_key()
        assert {type(outcome) for outcome in run(both(key))} == {Stored, Exists}
        assert isinstance(run(store.put(key, parts)), Exists)
        assert read_room(client) == BUDGET - number * OBJECT_BYTES
    run(store.close())
    run(other.close())


def test_a_checkpoint_that_does_not_fit_is_refused_before_any_of_it_is_put(
    server: EmbeddedServer, run: Run, make_key: MakeKey, parts: dict[str, Part]
) -> None:
    store = RedisStore(server.address, budget_bytes=BUDGET)
    run(store.put(make_key(), parts))
    assert run(store.prepare([], BUDGET - OBJECT_BYTES)) == Ready()
    refused = run(store.prepare([], BUDGET - OBJECT_BYTES + 1))
    assert isinstance(refused, Dropped)
    assert refused.reason is DropReason.NO_ROOM
    run(store.close())


class Writer:
    """Puts checkpoints without KV, each with its row, as fast as the store takes them."""

    def __init__(self, address: StoreAddress, parts: dict[str, Part]) -> None:
        self.namespace = os.urandom(32)
        self.log = EventLog(address, self.namespace, "writer", 1)
        self.outcomes: list[Any] = []
        self._store = RedisStore(address, budget_bytes=BUDGET)
        self._parts = parts
        self._ends = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._write()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self) -> Any:
        return asyncio.run(self._put())

    def close(self) -> None:
        self._ends.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.log.close()
        asyncio.run(self._store.close())

    async def _write(self) -> None:
        while not self._ends.is_set():
            outcome = await self._put()
            if isinstance(outcome, Dropped):
                await asyncio.sleep(0.01)

    async def _put(self) -> Any:
        key = ObjectKey("ck", self.namespace, os.urandom(32), 64)
        outcome = await self._store.put(key, self._parts)
        self.outcomes.append(outcome)
        if isinstance(outcome, Stored):
            now_ms = time.time_ns() // 1_000_000
            row = StoredCheckpoint(64, 1, OBJECT_BYTES, 0, None, None, now_ms, 3600, 1)
            self.log.append(PrefixEvent("add", key.prefix, 64, "store"), row)
        return outcome


@pytest.fixture
def writer(server: EmbeddedServer, parts: dict[str, Part]) -> Iterator[Writer]:
    made = Writer(server.address, parts)
    yield made
    made.close()


def test_the_budget_holds_while_writers_press_and_the_keeper_makes_room(
    server: EmbeddedServer, client: redis.Redis, writer: Writer, eventually: Eventually
) -> None:
    eventually(lambda: writer.log.stats()["snapshots_written"] > 0)
    empty_bytes = client.info("memory")["used_memory"]
    keeper = StoreKeeper(server.address, server.address, "a", KeeperLimits(BUDGET))
    eventually(lambda: keeper.stats()["rounds"] == 1)
    writer.start()
    most, ends = 0, time.monotonic() + 4
    while time.monotonic() < ends:
        most = max(most, client.info("memory")["used_memory"] - empty_bytes)
        time.sleep(0.005)
    stored = sum(isinstance(outcome, Stored) for outcome in writer.outcomes)
    # Room was made again and again, and before the next of the regular rounds.
    assert stored > 20
    assert keeper.stats()["failures"] == 0
    # One object in flight, one whose row may not have been told, the index, and what is being freed.
    assert most < BUDGET + 4 * OBJECT_BYTES
    keeper.close()


def test_data_of_others_evicts_nothing_of_ours_and_eviction_takes_just_enough(
    server: EmbeddedServer, client: redis.Redis, writer: Writer, eventually: Eventually
) -> None:
    for number in range(64):
        client.set(f"somebody else's {number}", bytes(1 << 20))
    for _ in range(10):
        assert isinstance(writer.put(), Stored)
    eventually(lambda: writer.log.stats()["events_sent"] == 10 and writer.log.stats()["snapshots_written"] > 0)
    names = index_names(writer.namespace)
    keeper = StoreKeeper(server.address, server.address, "a", KeeperLimits(BUDGET), 0.1)
    eventually(lambda: keeper.stats()["rounds"] > 3)
    assert len(scan_checkpoints(client, names)) == 10
    assert keeper.stats()["server_bytes"] > 64 << 20
    assert 10_000_000 < keeper.stats()["used_bytes"] < 10_200_000
    # The eleventh passes the high water: two go, for one alone would not reach the low water.
    assert isinstance(writer.put(), Stored)
    eventually(lambda: len(scan_checkpoints(client, names)) < 11)
    eventually(lambda: keeper.stats()["rounds"] > 8)
    assert len(scan_checkpoints(client, names)) == 10
    assert keeper.stats()["evictions_budget"] == 1
    keeper.close()


def test_room_is_made_for_a_large_checkpoint_that_was_refused(
    server: EmbeddedServer, client: redis.Redis, run: Run, writer: Writer, eventually: Eventually
) -> None:
    keeper = StoreKeeper(server.address, server.address, "a", KeeperLimits(BUDGET))
    for _ in range(10):
        writer.put()
    eventually(lambda: writer.log.stats()["events_sent"] >= 10 and keeper.stats()["rounds"] >= 1)
    store = RedisStore(server.address, budget_bytes=BUDGET)
    assert isinstance(run(store.prepare([], BUDGET // 2)), Dropped)
    eventually(lambda: run(store.prepare([], BUDGET // 2)) == Ready())
    held = len(scan_checkpoints(client, index_names(writer.namespace)))
    # Not for one that would take more than half of the budget; just so much is given up for it.
    for _ in range(30):
        assert isinstance(run(store.prepare([], BUDGET * 3 // 4)), Dropped)
        time.sleep(0.05)
    assert 4 <= len(scan_checkpoints(client, index_names(writer.namespace))) <= held <= 6
    run(store.close())
    keeper.close()


def test_nothing_goes_for_a_checkpoint_that_would_not_come_in_even_then(
    server: EmbeddedServer, client: redis.Redis, run: Run, writer: Writer, eventually: Eventually
) -> None:
    keeper = StoreKeeper(server.address, server.address, "a", KeeperLimits(BUDGET), period_s=0.5)
    for _ in range(10):
        writer.put()
    eventually(lambda: writer.log.stats()["events_sent"] >= 10)
    store = RedisStore(server.address, budget_bytes=BUDGET)
    assert isinstance(run(store.prepare([], BUDGET * 3 // 4)), Dropped)
    rounds = keeper.stats()["rounds"]
    eventually(lambda: keeper.stats()["rounds"] >= rounds + 3)
    assert len(scan_checkpoints(client, index_names(writer.namespace))) == 10
    run(store.close())
    keeper.close()


def test_the_servers_own_limit_counts_all_that_it_holds(
    server: EmbeddedServer, client: redis.Redis, writer: Writer, eventually: Eventually
) -> None:
    for _ in range(10):
        writer.put()
    eventually(lambda: writer.log.stats()["events_sent"] == 10 and writer.log.stats()["snapshots_written"] > 0)
    # Buffers of connections that have just moved much would count, and be gone when the keeper looks.
    eventually(lambda: client.info("memory")["mem_clients_normal"] < 200_000)
    client.config_set("maxmemory", int(client.info("memory")["used_memory"] / 0.9))
    keeper = StoreKeeper(server.address, server.address, "a", KeeperLimits(), 0.1)
    eventually(lambda: len(scan_checkpoints(client, index_names(writer.namespace))) < 10)
    eventually(lambda: keeper.stats()["rounds"] > 5)
    left = len(scan_checkpoints(client, index_names(writer.namespace)))
    assert 7 <= left <= 9
    assert read_room(client) == BUDGET - 10 * OBJECT_BYTES
    keeper.close()


def test_objects_that_no_row_describes_count_too(
    server: EmbeddedServer,
    client: redis.Redis,
    run: Run,
    make_key: MakeKey,
    parts: dict[str, Part],
    writer: Writer,
    eventually: Eventually,
) -> None:
    """A writer that died left them."""
    eventually(lambda: writer.log.stats()["snapshots_written"] > 0)
    store = RedisStore(server.address)
    for _ in range(5):
        run(store.put(make_key(), parts))
    keeper = StoreKeeper(server.address, server.address, "a", KeeperLimits(BUDGET), 0.1)
    eventually(lambda: 5 * OBJECT_BYTES < keeper.stats()["used_bytes"] < 7 * OBJECT_BYTES)
    eventually(lambda: (read_room(client) or 0) < BUDGET - 5 * OBJECT_BYTES)
    run(store.close())
    keeper.close()
