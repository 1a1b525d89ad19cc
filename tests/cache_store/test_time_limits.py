"""How long a call may take: a moment for the answer, and for every byte what the slowest tolerated network needs."""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any

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

SMALL = {"rec": ("uint8", (100,))}
LARGE = {"rec": ("uint8", (3_000_000,))}
STALL_S = 1.0


def impatient(server: EmbeddedServer) -> RedisStore:
    """0.3 s for an answer, and 10 s more for the large object."""
    return RedisStore(
        StoreAddress(server.url, server.password, operation_timeout_s=0.3, min_bytes_per_s=300_000),
        max_object_bytes=1 << 30,
    )


def stall(server: EmbeddedServer) -> threading.Timer:
    """Stops the server for a while."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    timer = threading.Timer(STALL_S, os.kill, (server.pid, signal.SIGCONT))
    timer.start()
    return timer


def test_a_slow_network_may_move_a_large_object_in_its_time(
    start_server: StartServer, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    server, key, parts = start_server(), make_key(), make_parts(**LARGE)
    store = impatient(server)
    # To log in is a matter of the short time.
    assert isinstance(run(store.put(make_key(), make_parts(**SMALL))), Stored)
    stall(server)
    assert isinstance(run(store.put(key, parts)), Stored)
    stall(server)
    assert isinstance(run(store.get(key, empty_like(parts))), Hit)
    run(store.close())


def test_the_same_stall_is_too_long_for_a_small_one(
    start_server: StartServer, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    server, parts = start_server(), make_parts(**SMALL)
    store = impatient(server)
    timer = stall(server)
    dropped, missed = run(store.put(make_key(), parts)), run(store.get(make_key(), empty_like(parts)))
    timer.join()
    assert (type(dropped), dropped.reason) == (Dropped, DropReason.TIMEOUT)
    assert (type(missed), missed.reason) == (Miss, MissReason.TIMEOUT)
    run(store.close())


def test_what_waits_behind_other_puts_is_given_their_time_too(
    start_server: StartServer, run: Run, make_key: MakeKey, make_parts: MakeParts
) -> None:
    server, large, small = start_server(), make_parts(**LARGE), make_parts(**SMALL)
    store = impatient(server)

    async def put_both() -> list[Any]:
        return list(await asyncio.gather(store.put(make_key(), large), store.put(make_key(), small)))

    assert isinstance(run(store.put(make_key(), small)), Stored)
    stall(server)
    assert [type(outcome) for outcome in run(put_both())] == [Stored, Stored]
    assert store.stats()["breaker_opened"] == 0
    run(store.close())
