"""A server that fails at any command of a publish or a read: a full miss or a whole object, counted, nothing torn."""

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Dropped, DropReason, Hit, Miss, MissReason, Part, Stored

Run = Callable[[Awaitable[Any]], Any]
MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
EmptyLike = Callable[[dict[str, Part]], dict[str, Part]]
Connect = Callable[[StoreAddress], redis.Redis]
Script = Callable[[list[bytes]], bytes | bool | None]
Scripted = Callable[..., Any]

FAULTS = {
    "cut": None,
    "OOM": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "LOADING": b"-LOADING the dataset is in memory\r\n",
    "READONLY": b"-READONLY You can't write against a read only replica.\r\n",
    "MISCONF": b"-MISCONF Errors writing to the AOF file: No space left on device\r\n",
    "NOPERM": b"-NOPERM this user has no permissions\r\n",
    "garbage": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "huge value": b"$999999999999\r\n",
    "huge array": b"*999999999\r\n",
    "number": b":7\r\n",
    "nothing": b"$-1\r\n",
    "empty": b"$0\r\n\r\n",
}
_HANDSHAKE = (b"AUTH", b"SELECT", b"CLIENT")


def failing_from(number: int, answer: bytes | None, seen: list[bytes]) -> Script:
    """Fails from the command of this number on, not counting the log-in, which every new connection repeats."""

    def script(arguments: list[bytes]) -> bytes | bool | None:
        if arguments[0] in _HANDSHAKE:
            return True
        seen.append(arguments[0])
        return answer if len(seen) > number else True

    return script


def address_of(port: int, password: str) -> StoreAddress:
    return StoreAddress(f"redis://127.0.0.1:{port}/0", password, connect_timeout_s=2.0, operation_timeout_s=1.5)


@pytest.mark.parametrize("kind", ["ck", "kv"])
@pytest.mark.parametrize("fault", ["cut", "OOM", "READONLY", "garbage", "huge array", "nothing"])
def test_a_publish_that_fails_at_any_command_leaves_the_object_whole_or_absent(
    server: EmbeddedServer,
    connect: Connect,
    scripted_server: Scripted,
    kind: str,
    fault: str,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    reader, client, parts = RedisStore(server.address), connect(server.address), make_parts()
    for number in itertools.count():
        key, into, seen = make_key(kind), empty_like(parts), list[bytes]()
        writer = RedisStore(
            address_of(scripted_server(failing_from(number, FAULTS[fault], seen), server.port).port, server.password)
        )
        outcome = run(writer.put(key, parts))
        run(writer.close())
        found = run(reader.get(key, into))
        assert isinstance(found, Hit) or found == Miss(MissReason.ABSENT), (number, found)
        assert isinstance(found, Hit) or not isinstance(outcome, Stored), number
        if isinstance(found, Hit):
            assert all(bytes(into[name].data) == bytes(part.data) for name, part in parts.items())
        if isinstance(outcome, Dropped):
            assert writer.stats()[f"dropped_{outcome.reason}"] == 1
        left = list(client.scan_iter(match=f"*{key.prefix.hex()}*", count=1000))
        assert all(client.pttl(name) > 0 for name in left), number
        if len(seen) <= number:
            break
    assert isinstance(outcome, Stored)
    assert number >= (13 if kind == "ck" else 2)
    run(reader.close())


@pytest.mark.parametrize("kind", ["ck", "kv"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_that_fails_at_any_command_is_a_full_miss(
    server: EmbeddedServer,
    scripted_server: Scripted,
    kind: str,
    fault: str,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    plain, parts = RedisStore(server.address), make_parts()
    for number in itertools.count():
        key, seen = make_key(kind), list[bytes]()
        run(plain.put(key, parts))
        store = RedisStore(
            address_of(scripted_server(failing_from(number, FAULTS[fault], seen), server.port).port, server.password)
        )
        outcome = run(store.get(key, empty_like(parts)))
        run(store.close())
        if len(seen) <= number:
            break
        assert isinstance(outcome, Miss), number
        assert store.stats()[f"misses_{outcome.reason}"] == 1
    assert isinstance(outcome, Hit)
    assert number == 3
    run(plain.close())


def test_a_reply_lost_after_the_rename_is_no_stored_and_yet_a_whole_object(
    server: EmbeddedServer,
    connect: Connect,
    scripted_server: Scripted,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    """The writer cannot know; whoever asks finds it, and it does not live for ever."""
    key, parts, names = make_key(), make_parts(), list[bytes]()

    def script(arguments: list[bytes]) -> bytes | bool | None:
        names.append(arguments[0])
        return None if names.count(b"EXEC") and names[-1] == b"PTTL" else True

    proxy = scripted_server(script, server.port)
    writer, reader = RedisStore(address_of(proxy.port, server.password)), RedisStore(server.address)
    assert isinstance(run(writer.put(key, parts)), Stored)
    lost = run(writer.put(key, parts))
    assert isinstance(lost, Dropped)
    assert lost.reason is DropReason.UNAVAILABLE
    assert isinstance(run(reader.get(key, empty_like(parts))), Hit)
    run(writer.close())
    run(reader.close())
