"""A stored object with anything wrong in it is a miss of the whole, is counted, and makes room for a good one."""

import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
import redis

from warmstate.cache_store.codec import CHUNK_BYTES, describe, encode_manifest
from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.names import object_name
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.redis_objects import MANIFEST_FIELD
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Hit, Miss, MissReason, Part, Stored

Run = Callable[[Awaitable[Any]], Any]
MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
EmptyLike = Callable[[dict[str, Part]], dict[str, Part]]

TWO_CHUNKS = {"rec": ("uint8", (CHUNK_BYTES + 5,)), "conv": ("int8", (3,))}


@pytest.fixture
def store(server: EmbeddedServer, run: Run) -> Iterator[RedisStore]:
    made = RedisStore(server.address)
    yield made
    run(made.close())


@pytest.fixture
def client(server: EmbeddedServer, connect: Callable[[StoreAddress], redis.Redis]) -> redis.Redis:
    return connect(server.address)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def test_every_flipped_byte_of_a_checkpoint_is_a_miss(
    store: RedisStore, client: redis.Redis, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key, parts = make_key(), make_parts()
    into, name = empty_like(parts), object_name(key)
    run(store.put(key, parts))
    fields = cast(dict[bytes, bytes], client.hgetall(name))
    num_flips = 0
    for field, value in fields.items():
        for at in range(len(value)):
            # The reader removed the object, so all of it is written again.
            for other, whole in fields.items():
                client.hset(name, other, flipped(value, at) if other == field else whole)
            outcome = run(store.get(key, into))
            assert isinstance(outcome, Miss), f"byte {at} of {field!r}"
            assert outcome.reason is MissReason.CORRUPT
            num_flips += 1
    assert num_flips == sum(len(value) for value in fields.values())
    assert store.stats()["misses_corrupt"] == num_flips


def test_every_flipped_byte_of_a_segment_is_a_miss(
    store: RedisStore, client: redis.Redis, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key, parts = make_key("kv"), make_parts(kv=("bfloat16", (2, 1, 2, 8, 4)))
    into, name = empty_like(parts), object_name(key)
    run(store.put(key, parts))
    value = client.get(name)
    assert isinstance(value, bytes)
    for at in range(len(value)):
        client.set(name, flipped(value, at))
        outcome = run(store.get(key, into))
        assert isinstance(outcome, Miss), f"byte {at}"
        assert outcome.reason is MissReason.CORRUPT


@pytest.mark.parametrize("field", [MANIFEST_FIELD, "rec.0", "rec.1", "conv.0"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long"])
def test_a_damaged_field_is_a_miss_and_is_removed(
    store: RedisStore,
    client: redis.Redis,
    field: str,
    damage: str,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    key, parts = make_key(), make_parts(**TWO_CHUNKS)
    into, name = empty_like(parts), object_name(key)
    run(store.put(key, parts))
    value = client.hget(name, field)
    assert isinstance(value, bytes)
    if damage == "missing":
        client.hdel(name, field)
    else:
        client.hset(name, field, {"empty": b"", "short": value[:-1], "long": value + b"\0"}[damage])
    outcome = run(store.get(key, into))
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.CORRUPT
    assert not client.exists(name)
    assert isinstance(run(store.put(key, parts)), Stored)
    assert isinstance(run(store.get(key, into)), Hit)
    run(store.delete(key))


@pytest.mark.parametrize("size", [100, CHUNK_BYTES + 5], ids=["one read", "several reads"])
@pytest.mark.parametrize("damage", ["empty", "no payload", "short", "long"])
def test_a_segment_of_a_wrong_length_is_a_miss_and_is_removed(
    store: RedisStore,
    client: redis.Redis,
    size: int,
    damage: str,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    key, parts = make_key("kv"), make_parts(kv=("uint8", (size,)))
    into, name = empty_like(parts), object_name(key)
    run(store.put(key, parts))
    value = client.get(name)
    assert isinstance(value, bytes)
    client.set(name, {"empty": b"", "no payload": value[:-size], "short": value[:-1], "long": value + b"\0"}[damage])
    outcome = run(store.get(key, into))
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.CORRUPT
    assert not client.exists(name)


def test_an_object_under_another_ones_name_is_a_miss(
    store: RedisStore, client: redis.Redis, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    written, asked, parts = make_key(), make_key(), make_parts()
    run(store.put(written, parts))
    client.rename(object_name(written), object_name(asked))
    outcome = run(store.get(asked, empty_like(parts)))
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.CORRUPT


def test_namespaces_that_share_a_short_name_do_not_share_state(
    store: RedisStore, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key, parts = make_key(), make_parts()
    twin = dataclasses.replace(key, namespace=key.namespace[:8] + bytes(24))
    assert object_name(twin) == object_name(key)
    run(store.put(key, parts))
    assert isinstance(run(store.get(twin, empty_like(parts))), Miss)


def test_a_manifest_of_another_version_is_a_miss_and_stays(
    store: RedisStore, client: redis.Redis, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key, parts = make_key(), make_parts()
    name = object_name(key)
    run(store.put(key, parts))
    client.hset(name, MANIFEST_FIELD, encode_manifest(describe(key, parts, epoch=0), schema_version=2))
    outcome = run(store.get(key, empty_like(parts)))
    assert outcome == Miss(MissReason.LAYOUT, "schema version 2")
    assert client.exists(name)


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_a_value_of_another_type_under_the_name_is_a_miss(
    store: RedisStore,
    client: redis.Redis,
    kind: str,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    key, parts = make_key(kind), make_parts()
    client.rpush(object_name(key), b"not ours")
    assert isinstance(run(store.get(key, empty_like(parts))), Miss)
    assert store.stats()["breaker_open"] == 0
