"""Connections to the payload server are open before they are needed, and again before that."""

import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

from warmstate.cache_store.connections import KeptConnections
from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Hit, Miss, MissReason, Part, Stored

Eventually = Callable[[Callable[[], bool]], None]
StartServer = Callable[..., EmbeddedServer]
Run = Callable[[Awaitable[Any]], Any]


@pytest.fixture
def keep() -> Iterator[Callable[..., KeptConnections]]:
    kept: list[KeptConnections] = []

    def make(address: StoreAddress, size: int = 3) -> KeptConnections:
        kept.append(KeptConnections(address, size))
        return kept[-1]

    yield make
    for each in kept:
        each.close()


def num_clients(client: redis.Redis) -> int:
    return len([each for each in client.client_list() if each["cmd"] != "client|list"])


def test_all_are_open_before_anybody_asks_and_stay(
    start_server: StartServer, connect: Callable[[StoreAddress], redis.Redis], keep: Any, eventually: Eventually
) -> None:
    server = start_server()
    kept, client = keep(server.address), connect(server.address)
    eventually(lambda: kept.num_ready == 3)
    for _ in range(20):
        with kept.lend() as one, kept.lend() as other:
            assert one is not other
    assert (kept.num_opened, num_clients(client)) == (3, 3)


def test_a_server_that_restarts_is_connected_to_without_anybody_asking(
    start_server: StartServer, keep: Any, eventually: Eventually
) -> None:
    server = start_server()
    kept = keep(server.address)
    eventually(lambda: kept.num_ready == 3)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    eventually(lambda: kept.num_ready == 0)
    start_server(port=server.port, password=server.password)
    eventually(lambda: kept.num_ready == 3)
    assert kept.num_opened == 6


def test_one_that_comes_back_with_a_reply_under_way_is_replaced(
    start_server: StartServer, keep: Any, eventually: Eventually
) -> None:
    kept = keep(start_server().address, 1)
    with kept.lend() as connection:
        connection.send_command("PING")
        eventually(lambda: connection.can_read(0))
    eventually(lambda: kept.num_opened == 2)
    with kept.lend() as connection:
        connection.send_command("ECHO", "x")
        assert connection.read_response() == b"x"


def test_who_asks_while_the_server_is_away_is_told_at_once(keep: Any) -> None:
    kept = keep(StoreAddress("redis://127.0.0.1:1/0", connect_timeout_s=5.0))
    for _ in range(5):
        started = time.monotonic()
        with pytest.raises(redis.ConnectionError), kept.lend():
            raise AssertionError("there is no such server")
        assert time.monotonic() - started < 1.0


def test_who_asks_too_many_waits_no_longer_than_connecting_may_take(start_server: StartServer, keep: Any) -> None:
    server = start_server()
    kept = keep(StoreAddress(server.url, server.password, connect_timeout_s=0.2), 1)
    with kept.lend():
        started = time.monotonic()
        with pytest.raises(redis.TimeoutError), kept.lend():
            raise AssertionError("the only one is lent")
        assert 0.15 < time.monotonic() - started < 1.0


def test_closing_while_one_is_lent_closes_it_when_it_comes_back(
    start_server: StartServer, connect: Callable[[StoreAddress], redis.Redis], eventually: Eventually
) -> None:
    server = start_server()
    kept, client = KeptConnections(server.address, 2), connect(server.address)
    with kept.lend() as connection:
        kept.close()
        connection.send_command("PING")
        assert connection.read_response() == b"PONG"
    eventually(lambda: num_clients(client) == 0)
    with pytest.raises(redis.ConnectionError), kept.lend():
        raise AssertionError("closed")
    assert "warmstate-store-connect" not in {thread.name for thread in threading.enumerate()}


def test_the_first_request_after_a_restart_finds_a_connection(
    start_server: StartServer,
    run: Run,
    eventually: Eventually,
    make_key: Callable[..., ObjectKey],
    make_parts: Callable[..., dict[str, Part]],
    empty_like: Callable[[dict[str, Part]], dict[str, Part]],
) -> None:
    server, key, parts = start_server(), make_key(), make_parts()
    store = RedisStore(server.address)
    assert isinstance(run(store.put(key, parts)), Stored)
    server.stop()
    start_server(port=server.port, password=server.password)
    eventually(lambda: store.stats()["connections_opened"] == 6)
    assert run(store.get(key, empty_like(parts))) == Miss(MissReason.ABSENT)
    assert isinstance(run(store.put(key, parts)), Stored)
    assert isinstance(run(store.get(key, empty_like(parts))), Hit)
    assert store.stats()["misses_unavailable"] == 0
    run(store.close())
