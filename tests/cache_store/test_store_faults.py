"""Whatever the server does, a call ends within its timeout as a counted result, and nothing torn becomes visible."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis

from warmstate.cache_store.breaker import Breaker
from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Dropped, DropReason, Hit, Miss, MissReason, Part, Stored

Run = Callable[[Awaitable[Any]], Any]
MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
EmptyLike = Callable[[dict[str, Part]], dict[str, Part]]
StartServer = Callable[..., EmbeddedServer]
Connect = Callable[[StoreAddress], redis.Redis]

TIMEOUT_S = 1.0


def address_of(port: int, password: str | None = None) -> StoreAddress:
    return StoreAddress(f"redis://127.0.0.1:{port}/0", password, operation_timeout_s=TIMEOUT_S)


async def get_and_put(
    store: RedisStore, key: ObjectKey, parts: dict[str, Part], into: dict[str, Part]
) -> tuple[MissReason, DropReason]:
    miss, drop = await store.get(key, into), await store.put(key, parts)
    assert isinstance(miss, Miss), miss
    assert isinstance(drop, Dropped), drop
    return miss.reason, drop.reason


def test_a_stalled_server_costs_one_timeout_and_never_touches_the_buffers_later(
    start_server: StartServer, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    server, key, parts = start_server(), make_key(), make_parts(rec=("uint8", (9_000_000,)))
    patient, store = RedisStore(server.address), RedisStore(address_of(server.port, server.password))
    into = empty_like(parts)
    poison = bytes(into["rec"].data)
    assert isinstance(run(patient.put(key, parts)), Stored)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    started = time.monotonic()
    outcome = run(store.get(key, into))
    waited_s = time.monotonic() - started
    os.kill(server.pid, signal.SIGCONT)
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.TIMEOUT
    # Not a measurement: the bound that the caller relies on, with room for a loaded machine.
    assert waited_s < TIMEOUT_S + 2
    assert store.stats()["misses_timeout"] == 1
    run(asyncio.sleep(TIMEOUT_S))
    assert bytes(into["rec"].data) == poison
    assert isinstance(run(patient.get(key, into)), Hit)
    run(patient.close())
    run(store.close())


def test_a_stall_amid_many_calls_ends_all_of_them_and_opens_the_breaker(
    start_server: StartServer, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    server, parts = start_server(), make_parts()
    store = RedisStore(address_of(server.port, server.password))
    assert server.pid is not None

    async def many() -> list[Hit | Miss]:
        return list(await asyncio.gather(*(store.get(make_key(), empty_like(parts)) for _ in range(8))))

    os.kill(server.pid, signal.SIGSTOP)
    outcomes = run(many())
    after = run(store.get(make_key(), empty_like(parts)))
    os.kill(server.pid, signal.SIGCONT)
    assert [outcome.reason for outcome in outcomes] == [MissReason.TIMEOUT] * 8
    assert after == Miss(MissReason.BREAKER_OPEN)
    assert store.stats()["breaker_open"] == 1
    run(store.close())


def test_a_dead_server_opens_the_breaker_and_a_new_one_closes_it(
    start_server: StartServer, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    server, key, parts = start_server(), make_key(), make_parts()
    now = [0.0]
    store = RedisStore(address_of(server.port, server.password), breaker=Breaker(3, 5.0, clock=lambda: now[0]))
    assert isinstance(run(store.put(key, parts)), Stored)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    reasons = [run(store.get(key, empty_like(parts))).reason for _ in range(4)]
    assert reasons == [MissReason.UNAVAILABLE] * 3 + [MissReason.BREAKER_OPEN]
    assert run(store.put(key, parts)) == Dropped(DropReason.BREAKER_OPEN)
    start_server(port=server.port, password=server.password)
    assert run(store.get(key, empty_like(parts))) == Miss(MissReason.BREAKER_OPEN)
    now[0] = 5.0
    assert run(store.get(key, empty_like(parts))) == Miss(MissReason.ABSENT)
    assert isinstance(run(store.put(key, parts)), Stored)
    assert store.stats()["breaker_opened"] == 1
    run(store.close())


@pytest.mark.parametrize(
    "reply",
    [
        b"-LOADING the dataset is in memory\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"-NOPERM this user has no permissions\r\n",
        b"-READONLY You can't write against a read only replica.\r\n",
        b"-MISCONF errors writing to the AOF file: No space left on device\r\n",
        b"-ERR max number of clients reached\r\n",
        b"this is not the protocol\r\n",
        b"$-7\r\n",
        b"",
    ],
    ids=lambda reply: reply[:9].decode() or "silence",
)
def test_a_refusing_server_is_a_miss_and_a_drop(
    scripted_server: Callable[..., Any],
    reply: bytes,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    store = RedisStore(address_of(scripted_server(lambda _: reply).port, "secret"))
    parts = make_parts()
    reasons = run(get_and_put(store, make_key(), parts, empty_like(parts)))
    expected = (MissReason.UNAVAILABLE, DropReason.UNAVAILABLE)
    assert reasons == (expected if reply else (MissReason.TIMEOUT, DropReason.TIMEOUT))
    run(store.close())


def test_a_wrong_password_and_a_closed_port_are_unavailable(
    server: EmbeddedServer, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    parts = make_parts()
    for address in (address_of(server.port, "wrong"), address_of(server.port), address_of(1)):
        store = RedisStore(address)
        reasons = run(get_and_put(store, make_key(), parts, empty_like(parts)))
        assert reasons == (MissReason.UNAVAILABLE, DropReason.UNAVAILABLE)
        run(store.close())


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_a_full_server_drops_the_put_and_still_serves_reads(
    start_server: StartServer,
    connect: Connect,
    kind: str,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    server = start_server(max_memory_bytes=26 << 20, eviction_policy="noeviction")
    store = RedisStore(server.address)
    small, big = make_parts(), make_parts(rec=("uint8", (12_000_000,)))
    kept = make_key(kind)
    run(store.put(kept, small))
    outcomes = [run(store.put(make_key(kind), big)) for _ in range(6)]
    assert isinstance(outcomes[0], Stored)
    drops = [outcome for outcome in outcomes if isinstance(outcome, Dropped)]
    assert {drop.reason for drop in drops} == {DropReason.NO_ROOM}
    assert isinstance(run(store.get(kept, empty_like(small))), Hit)
    assert store.stats()["breaker_opened"] == 0
    assert store.stats()["dropped_no_room"] == len(drops)
    assert not [name for name in connect(server.address).scan_iter() if b":tmp:" in name]
    run(store.close())


def test_a_server_that_answers_closes_the_breaker_even_when_it_is_full(
    start_server: StartServer, run: Run, make_key: MakeKey, make_parts: MakeParts
) -> None:
    breaker = Breaker(num_failures=1, retry_s=0)
    store = RedisStore(start_server(max_memory_bytes=3 << 20).address, breaker=breaker)
    breaker.failed()
    refused = run(store.put(make_key(), make_parts(rec=("uint8", (4_000_000,)))))
    assert isinstance(refused, Dropped)
    assert refused.reason is DropReason.NO_ROOM
    assert not breaker.is_open
    run(store.close())


def test_puts_beyond_the_bytes_in_flight_are_dropped_not_queued(
    server: EmbeddedServer, run: Run, make_key: MakeKey, make_parts: MakeParts
) -> None:
    parts = make_parts(rec=("uint8", (1_000_000,)))
    store = RedisStore(server.address, max_in_flight_bytes=2_500_000)

    async def many() -> list[Any]:
        return list(await asyncio.gather(*(store.put(make_key(), parts) for _ in range(5))))

    outcomes = run(many())
    assert sum(isinstance(outcome, Stored) for outcome in outcomes) == 2
    assert {outcome.reason for outcome in outcomes if isinstance(outcome, Dropped)} == {DropReason.NO_ROOM}
    assert store.stats()["in_flight_bytes"] == 0
    run(store.close())


def test_a_get_does_not_wait_for_the_puts_before_it(
    server: EmbeddedServer, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    small, large = make_parts(), make_parts(rec=("uint8", (4_000_000,)))
    store, kept = RedisStore(server.address, ttl_s=10), make_key()
    assert isinstance(run(store.put(kept, small)), Stored)

    async def get_behind_puts() -> int:
        puts = [asyncio.create_task(store.put(make_key(), large)) for _ in range(20)]
        await asyncio.sleep(0)
        assert isinstance(await store.get(kept, empty_like(small)), Hit)
        num_done = sum(put.done() for put in puts)
        await asyncio.gather(*puts)
        return num_done

    assert run(get_behind_puts()) < 10
    run(store.close())


def test_closing_amid_calls_ends_them_as_results(
    start_server: StartServer, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    server, parts = start_server(), make_parts()
    store = RedisStore(address_of(server.port, server.password))
    assert server.pid is not None

    async def close_amid() -> list[Any]:
        calls = [asyncio.create_task(store.get(make_key(), empty_like(parts))) for _ in range(6)]
        await asyncio.sleep(0.05)
        await store.close()
        return list(await asyncio.gather(*calls))

    os.kill(server.pid, signal.SIGSTOP)
    outcomes = run(close_amid())
    os.kill(server.pid, signal.SIGCONT)
    assert all(isinstance(outcome, Miss) for outcome in outcomes)


def test_cancelling_a_call_cancels_it(
    start_server: StartServer, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    server, parts = start_server(), make_parts()
    store = RedisStore(address_of(server.port, server.password))
    assert server.pid is not None

    async def cancel() -> bool:
        call = asyncio.create_task(store.get(make_key(), empty_like(parts)))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait([call])
        return call.cancelled()

    os.kill(server.pid, signal.SIGSTOP)
    was_cancelled = run(cancel())
    os.kill(server.pid, signal.SIGCONT)
    assert was_cancelled
    run(store.close())


@pytest.mark.parametrize("is_stalled", [False, True])
def test_a_closed_store_leaves_no_connection_behind(
    start_server: StartServer,
    connect: Connect,
    eventually: Callable[[Callable[[], bool]], None],
    is_stalled: bool,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    server, parts = start_server(), make_parts()
    store = RedisStore(address_of(server.port, server.password))
    run(store.put(make_key(), parts))
    assert server.pid is not None
    if is_stalled:
        os.kill(server.pid, signal.SIGSTOP)
        run(store.get(make_key(), empty_like(parts)))
    run(store.close())
    os.kill(server.pid, signal.SIGCONT)
    client = connect(server.address)
    eventually(lambda: len(client.client_list()) == 1)
