"""Failures that users of other caches have reported, as far as a store can cause them; each named by its symptom.

vLLM #52470 (another request's bytes under this hash), LMCache #4701 (one page of many stored, restored as if whole),
Mooncake #2127, #3465, #850 and vllm-ascend #15060 (a part evicted, empty, or gone in the middle of a read), vLLM #47812
and #55297 (a failed load that is tried for ever).
"""

import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from warmstate.cache_store.codec import CHUNK_BYTES
from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.names import object_name
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Dropped, DropReason, Hit, Miss, MissReason, Part, Stored

Run = Callable[[Awaitable[Any]], Any]
MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
EmptyLike = Callable[[dict[str, Part]], dict[str, Part]]
Connect = Callable[[StoreAddress], redis.Redis]
StartServer = Callable[..., EmbeddedServer]
Eventually = Callable[[Callable[[], bool]], None]

FIVE_CHUNKS = {"rec": ("uint8", (5 * CHUNK_BYTES,))}


def address_of(port: int, password: str, timeout_s: float = 5.0) -> StoreAddress:
    return StoreAddress(f"redis://127.0.0.1:{port}/0", password, connect_timeout_s=2.0, operation_timeout_s=timeout_s)


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_buffers_used_again_after_a_late_put_never_show_up_under_its_key(
    start_server: StartServer,
    connect: Connect,
    eventually: Eventually,
    kind: str,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    server, key, parts = start_server(), make_key(kind), make_parts(rec=("uint8", (64 << 20,)))
    store = RedisStore(StoreAddress(server.url, server.password, operation_timeout_s=1.0, min_bytes_per_s=1 << 40))
    assert isinstance(run(store.put(make_key(kind), make_parts())), Stored)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    late = run(store.put(key, parts))
    assert (type(late), late.reason) == (Dropped, DropReason.TIMEOUT)
    parts["rec"].data[:] = b"\xee" * len(parts["rec"].data)
    os.kill(server.pid, signal.SIGCONT)
    run(store.close())
    client = connect(server.address)
    eventually(lambda: len(client.client_list()) <= 1)
    patient = RedisStore(server.address)
    assert run(patient.get(key, empty_like(parts))) == Miss(MissReason.ABSENT)
    run(patient.close())


@pytest.mark.parametrize("num_stored", range(6))
def test_an_object_of_which_some_chunks_were_stored_never_restores_as_if_whole(
    server: EmbeddedServer,
    connect: Connect,
    scripted_server: Callable[..., Any],
    num_stored: int,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    """Not even when every command was answered as if it had worked."""
    key, parts, seen = make_key(), make_parts(**FIVE_CHUNKS), list[bytes]()

    def forgetful(arguments: list[bytes]) -> bytes | bool | None:
        seen.append(arguments[0])
        return b"+QUEUED\r\n" if arguments[0] == b"HSET" and seen.count(b"HSET") > num_stored else True

    writer = RedisStore(address_of(scripted_server(forgetful, server.port).port, server.password))
    reader = RedisStore(server.address)
    dropped = run(writer.put(key, parts))
    assert (type(dropped), dropped.reason) == (Dropped, DropReason.NO_ROOM)
    assert run(reader.get(key, empty_like(parts))) == Miss(MissReason.ABSENT)
    assert not list(connect(server.address).scan_iter(match=f"*{key.prefix.hex()}*", count=1000))
    run(writer.close())
    run(reader.close())


@pytest.mark.parametrize("kind", ["ck", "kv"])
@pytest.mark.parametrize("number", [1, 3, 5])
def test_an_object_evicted_in_the_middle_of_a_slow_read_is_one_full_miss_and_then_absent(
    server: EmbeddedServer,
    connect: Connect,
    scripted_server: Callable[..., Any],
    kind: str,
    number: int,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    key, parts, client = make_key(kind), make_parts(**FIVE_CHUNKS), connect(server.address)
    num_reads = 0

    def evicting(arguments: list[bytes]) -> bytes | bool | None:
        nonlocal num_reads
        num_reads += arguments[0] in (b"HGET", b"GETRANGE")
        if num_reads == number + 1:
            client.unlink(object_name(key))
        return True

    store = RedisStore(address_of(scripted_server(evicting, server.port).port, server.password))
    run(store.put(key, parts))
    first, second = (run(store.get(key, empty_like(parts))) for _ in range(2))
    assert (type(first), first.reason) == (Miss, MissReason.CORRUPT)
    assert second == Miss(MissReason.ABSENT)
    assert store.stats()["misses_corrupt"] == store.stats()["misses_absent"] == 1
    assert isinstance(run(store.put(key, parts)), Stored)
    assert isinstance(run(store.get(key, empty_like(parts))), Hit)
    run(store.close())


def test_a_server_made_a_read_only_replica_drops_puts_and_still_serves(
    start_server: StartServer,
    connect: Connect,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    server, key, parts = start_server(), make_key(), make_parts()
    store = RedisStore(server.address)
    run(store.put(key, parts))
    connect(server.address).execute_command("REPLICAOF", "127.0.0.1", "1")
    dropped = run(store.put(make_key(), parts))
    assert (type(dropped), dropped.reason) == (Dropped, DropReason.UNAVAILABLE)
    assert isinstance(run(store.get(key, empty_like(parts))), Hit)
    run(store.close())


@pytest.fixture
def server_with_a_small_disk(server_binary: str, tmp_path: Path, eventually: Eventually) -> Iterator[StoreAddress]:
    """A server that logs every write to a file that cannot grow beyond 2 MiB."""
    path = tmp_path / "s"
    limits = 'trap "" XFSZ; ulimit -f 2048; exec "$@"'
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "yes", "--dir", str(tmp_path)]
    command = ["bash", "-c", limits, "bash", server_binary, *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            eventually(path.exists)
            yield StoreAddress(f"unix://{path}")
        finally:
            process.kill()


def test_a_full_disk_under_the_servers_log_drops_puts_and_still_serves(
    server_with_a_small_disk: StoreAddress, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    store, kept = RedisStore(server_with_a_small_disk), make_key()
    parts = make_parts(rec=("uint8", (500_000,)))
    assert isinstance(run(store.put(kept, parts)), Stored)
    outcomes = [run(store.put(make_key(), parts)) for _ in range(8)]
    dropped = [outcome for outcome in outcomes if isinstance(outcome, Dropped)]
    assert {drop.reason for drop in dropped} == {DropReason.UNAVAILABLE}
    assert any("MISCONF" in drop.detail for drop in dropped)
    into = empty_like(parts)
    assert isinstance(run(store.get(kept, into)), Hit)
    assert bytes(into["rec"].data) == bytes(parts["rec"].data)
    assert store.stats()["breaker_opened"] == 0
    run(store.close())
