"""Connections cut between any two bytes, and what is left on the server afterwards."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.names import object_name, temporary_name
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.redis_objects import TEMPORARY_TTL_MS
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Hit, Miss, MissReason, Part, Ready, Stored

Run = Callable[[Awaitable[Any]], Any]
MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
EmptyLike = Callable[[dict[str, Part]], dict[str, Part]]
Connect = Callable[[StoreAddress], redis.Redis]


def address_of(port: int, password: str | None) -> StoreAddress:
    return StoreAddress(f"redis://127.0.0.1:{port}/0", password, connect_timeout_s=2.0, operation_timeout_s=5.0)


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_a_writer_cut_off_anywhere_leaves_the_object_whole_or_absent_and_nothing_for_ever(
    server: EmbeddedServer,
    connect: Connect,
    cut_proxy: Callable[..., Any],
    kind: str,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    parts, client, reader = make_parts(), connect(server.address), RedisStore(server.address)
    prefixes: list[bytes] = []
    num_whole = 0
    for up_bytes in range(0, 2800, 29):
        key = make_key(kind)
        prefixes.append(key.prefix.hex().encode())
        proxy = cut_proxy(server.port, up_bytes=up_bytes)
        writer = RedisStore(address_of(proxy.port, server.password))
        outcome = run(writer.put(key, parts))
        run(writer.close())
        found = run(reader.get(key, empty_like(parts)))
        assert isinstance(found, Hit) or found == Miss(MissReason.ABSENT), up_bytes
        assert isinstance(found, Hit) or not isinstance(outcome, Stored)
        num_whole += isinstance(found, Hit)
    assert 0 < num_whole < len(prefixes)
    left = [name for name in client.scan_iter(count=1000) if any(prefix in name for prefix in prefixes)]
    assert kind == "kv" or len(left) > num_whole, "no writer was cut off between two commands"
    assert [name for name in left if client.pttl(name) == -1] == []
    run(reader.close())


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_a_reader_cut_off_anywhere_misses_and_the_object_stays(
    server: EmbeddedServer,
    cut_proxy: Callable[..., Any],
    kind: str,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    key, parts, plain = make_key(kind), make_parts(), RedisStore(server.address)
    run(plain.put(key, parts))
    num_misses = 0
    for down_bytes in range(0, 600, 37):
        proxy = cut_proxy(server.port, down_bytes=down_bytes)
        store = RedisStore(address_of(proxy.port, server.password))
        outcome = run(store.get(key, empty_like(parts)))
        assert isinstance(outcome, Hit) or outcome.reason is MissReason.UNAVAILABLE
        num_misses += isinstance(outcome, Miss)
        run(store.close())
    assert 0 < num_misses < 17
    assert isinstance(run(plain.get(key, empty_like(parts))), Hit)
    run(plain.close())


def test_objects_and_temporaries_expire(
    server: EmbeddedServer, connect: Connect, run: Run, make_key: MakeKey, make_parts: MakeParts
) -> None:
    client, parts = connect(server.address), make_parts()
    store = RedisStore(server.address, ttl_s=100)
    for key in (make_key("ck"), make_key("kv")):
        run(store.put(key, parts))
        assert TEMPORARY_TTL_MS < client.pttl(object_name(key)) <= 100_000
        client.pexpire(object_name(key), 5_000)
        run(store.put(key, parts))
        assert client.pttl(object_name(key)) > 5_000
    run(store.close())


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_a_put_may_ask_for_another_life_but_shortens_none(
    server: EmbeddedServer, connect: Connect, run: Run, kind: str, make_key: MakeKey, make_parts: MakeParts
) -> None:
    client, key, parts = connect(server.address), make_key(kind), make_parts()
    store = RedisStore(server.address, ttl_s=1_000)
    run(store.put(key, parts, ttl_s=200))
    assert 100_000 < client.pttl(object_name(key)) <= 200_000
    run(store.put(key, parts))
    assert 900_000 < client.pttl(object_name(key)) <= 1_000_000
    run(store.put(key, parts, ttl_s=200))
    assert client.pttl(object_name(key)) > 900_000
    run(store.close())


def test_no_object_lives_longer_than_it_was_put_for(
    server: EmbeddedServer, connect: Connect, run: Run, make_key: MakeKey, make_parts: MakeParts
) -> None:
    """A temporary does: its writer may be slow."""
    client, parts, store = connect(server.address), make_parts(), RedisStore(server.address, ttl_s=7)
    for kind in ("ck", "kv"):
        key = make_key(kind)
        run(store.put(key, parts))
        assert 0 < client.pttl(object_name(key)) <= 7_000
    run(store.close())


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_what_a_checkpoint_needs_lives_as_long_as_it(
    server: EmbeddedServer, connect: Connect, run: Run, kind: str, make_key: MakeKey, make_parts: MakeParts
) -> None:
    client, store = connect(server.address), RedisStore(server.address, ttl_s=1_000)
    shorter, longer, lost = (make_key(kind) for _ in range(3))
    run(store.put(shorter, make_parts(), ttl_s=20))
    run(store.put(longer, make_parts(), ttl_s=9_000))
    assert run(store.prepare([shorter, lost, longer], 1)) == Ready((lost,))
    assert 900_000 < client.pttl(object_name(shorter)) <= 1_000_000
    assert client.pttl(object_name(longer)) > 8_000_000
    assert not client.exists(object_name(lost))
    run(store.prepare([shorter], 1, ttl_s=5_000))
    assert client.pttl(object_name(shorter)) > 4_000_000
    run(store.close())


def test_an_object_and_its_temporary_share_a_cluster_slot(
    server: EmbeddedServer, connect: Connect, make_key: MakeKey
) -> None:
    key, client = make_key(), connect(server.address)
    slots = {client.cluster("KEYSLOT", name) for name in (object_name(key), temporary_name(key))}
    assert len(slots) == 1
