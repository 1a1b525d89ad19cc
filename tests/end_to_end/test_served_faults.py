"""What dies while it serves: a replica under load, the store. Nobody's answer changes."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

REPLICA = "ray::ServeReplica:warmstate:replica"
STORE = "ray::ServeReplica:warmstate:store"
NUM_CLIENTS = 4


def test_killing_a_replica_under_load_is_seen_by_nobody(
    server: Any, replica_ids: list[str], eventually: Callable[..., None]
) -> None:
    rng = random.Random(9)
    prompts = [[rng.randrange(1, 250) for _ in range(rng.randrange(20, 260))] for _ in range(12)]
    expected = [tokens(server, prompt) for prompt in prompts]
    victim = server.processes(REPLICA)[0]
    stop = threading.Event()

    def keep_asking(first: int) -> list[tuple[int, list[int]]]:
        seen = []
        for turn in range(first, 10_000):
            if stop.is_set():
                break
            seen.append((turn % len(prompts), tokens(server, prompts[turn % len(prompts)])))
        return seen

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(keep_asking, first) for first in range(NUM_CLIENTS)]
        try:
            time.sleep(1)
            victim.kill()
            # At once, while Serve may not have noticed yet.
            for prompt, answer in zip(prompts, expected, strict=True):
                assert tokens(server, prompt) == answer
        finally:
            stop.set()
        seen = [item for client in clients for item in client.result()]
    assert len(seen) > NUM_CLIENTS
    assert [answer for _, answer in seen] == [expected[index] for index, _ in seen]

    survivors = set(server.ready_ids()) & set(replica_ids)
    (successor,) = set(server.wait_until_ready(2)) - survivors
    assert successor not in replica_ids
    again = server.complete(prompts[0] + prompts[1], successor, max_tokens=24, seed=5, ignore_eos=True)
    assert again.status_code == 200


def test_a_successor_is_warm_from_the_store(server: Any, eventually: Callable[..., None]) -> None:
    first, second = server.wait_until_ready(2)
    rng = random.Random(10)
    prompt = [rng.randrange(1, 250) for _ in range(200)]
    published = server.settled_metric("store_published", first)
    cold = server.complete(prompt, first, max_tokens=4, ignore_eos=True).json()
    eventually(lambda: server.metric("store_published", first) == published + 1)
    warm = server.complete(prompt, second, max_tokens=4, ignore_eos=True).json()
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]


def test_killing_the_store_costs_warmth_and_nothing_else(
    server: Any, replica_ids: list[str], eventually: Callable[..., None]
) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(1, 250) for _ in range(150)] for _ in range(8)]
    expected = [tokens(server, prompt, replica_ids[0]) for prompt in prompts]
    failures = store_failures(server)
    (store,) = server.processes("valkey-server")
    store.kill()
    assert [tokens(server, prompt, replica_ids[1]) for prompt in prompts] == expected
    eventually(lambda: store_failures(server) > failures)
    # It is started again, and shared again.
    eventually(lambda: len(server.processes("valkey-server")) == 1)
    stored = server.settled_metric("store_stored")
    eventually(lambda: tokens(server, random_prompt()) and server.metric("store_stored") > stored)


def test_the_store_comes_back_where_it_was_when_its_keeper_is_killed(
    server: Any, replica_ids: list[str], eventually: Callable[..., None]
) -> None:
    (keeper,), (store,) = server.processes(STORE), server.processes("valkey-server")
    keeper.kill()
    eventually(lambda: [process.pid for process in server.processes("valkey-server")] not in ([], [store.pid]))
    stored = server.settled_metric("store_stored")
    eventually(lambda: tokens(server, random_prompt()) and server.metric("store_stored") > stored)


def random_prompt() -> list[int]:
    return [random.randrange(1, 250) for _ in range(130)]


def tokens(server: Any, prompt: list[int], replica_id: str | None = None) -> list[int]:
    """A seeded answer, not a greedy one: what comes after a failover must count on from the tokens before it."""
    response = server.complete(prompt, replica_id, max_tokens=24, temperature=1, seed=5, ignore_eos=True)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def store_failures(server: Any) -> float:
    kinds = ("misses", "dropped")
    reasons = ("unavailable", "timeout", "breaker_open")
    counts: list[float] = [server.metric(f"store_{kind}", reason=reason) for kind in kinds for reason in reasons]
    return sum(counts)
