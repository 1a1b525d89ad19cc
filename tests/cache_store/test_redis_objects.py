"""Buffers are the caller's again as soon as the call has returned, whatever a late thread still does."""

import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

from warmstate.cache_store.connections import KeptConnections
from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.errors import LoanEnded
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.loan import Loan
from warmstate.cache_store.names import object_name
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.redis_objects import ObjectReader, ObjectWriter
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Dropped, DropReason, Miss, MissReason, Part, Stored

Connect = Callable[[StoreAddress], redis.Redis]
MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
EmptyLike = Callable[[dict[str, Part]], dict[str, Part]]


@pytest.fixture
def connections(server: EmbeddedServer) -> Iterator[KeptConnections]:
    made = KeptConnections(server.address, 2)
    yield made
    made.close()


def writer_of(connections: KeptConnections, key: ObjectKey, parts: dict[str, Part], loan: Loan) -> ObjectWriter:
    return ObjectWriter(connections, key, parts, loan, time.monotonic() + 10, epoch=1, ttl_ms=60_000)


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_a_late_reader_does_not_touch_the_buffers(
    connections: KeptConnections,
    kind: str,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    key, parts, loan = make_key(kind), make_parts(), Loan()
    into = empty_like(parts)
    assert isinstance(writer_of(connections, key, parts, loan).publish(), Stored)
    loan.close()
    with pytest.raises(LoanEnded):
        ObjectReader(connections, key, into, loan, time.monotonic() + 10).read()
    assert all(set(bytes(part.data)) == {0xA5} for part in into.values())


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_a_late_writer_publishes_nothing_and_leaves_no_temporary(
    server: EmbeddedServer,
    connections: KeptConnections,
    connect: Connect,
    kind: str,
    make_key: MakeKey,
    make_parts: MakeParts,
) -> None:
    client, key, loan = connect(server.address), make_key(kind), Loan()
    loan.close()
    outcome = writer_of(connections, key, make_parts(), loan).publish()
    assert isinstance(outcome, Dropped)
    assert outcome.reason is DropReason.TIMEOUT
    assert not client.exists(object_name(key))
    assert not list(client.scan_iter(match=f"*{key.prefix.hex()}*", count=1000))


def test_a_server_that_trickles_costs_one_timeout(
    run: Callable[[Awaitable[Any]], Any], make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    """Every byte comes in time for the socket; only the whole never comes."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(b"*3\r\n$1000000\r\n")
                while not done.wait(0.1):
                    client.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        port = listener.getsockname()[1]
        store = RedisStore(StoreAddress(f"redis://127.0.0.1:{port}/0", operation_timeout_s=0.5))
        outcome = run(store.get(make_key(), empty_like(make_parts())))
        done.set()
        thread.join()
        run(store.close())
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.TIMEOUT
