"""Under the server's own eviction a reader gets a whole object or a miss, never a torn one."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Hit, Miss, MissReason, Part, Stored

NUM_CHECKPOINTS = 20


@pytest.mark.parametrize("policy", ["volatile-lfu", "allkeys-lru", "volatile-ttl", "allkeys-random"])
def test_twenty_checkpoints_in_the_room_of_six_are_whole_or_absent(
    start_server: Callable[..., EmbeddedServer],
    policy: str,
    run: Callable[[Awaitable[Any]], Any],
    make_key: Callable[..., ObjectKey],
    make_parts: Callable[..., dict[str, Part]],
    empty_like: Callable[[dict[str, Part]], dict[str, Part]],
) -> None:
    server = start_server(max_memory_bytes=64 << 20, eviction_policy=policy)
    store = RedisStore(server.address)
    shape = {"rec": ("uint8", (9_000_000,)), "conv": ("uint8", (50_000,))}
    checkpoints = [(make_key(), make_parts(seed=seed, **shape)) for seed in range(NUM_CHECKPOINTS)]
    into = empty_like(checkpoints[0][1])
    num_stored = sum(isinstance(run(store.put(key, parts)), Stored) for key, parts in checkpoints)
    num_whole = 0
    for key, parts in checkpoints:
        outcome = run(store.get(key, into))
        assert isinstance(outcome, Hit) or outcome == Miss(MissReason.ABSENT)
        if isinstance(outcome, Hit):
            num_whole += 1
            assert all(bytes(into[name].data) == bytes(part.data) for name, part in parts.items())
    assert num_stored > 0
    assert 1 <= num_whole < NUM_CHECKPOINTS
    run(store.close())
