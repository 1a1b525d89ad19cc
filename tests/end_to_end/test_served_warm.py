"""Warm across replicas: what one process has computed, another resumes from the store, bit for bit."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.cluster

BLOCK = 64
CONCURRENCY = 8


def test_a_hit_from_the_store_equals_a_miss_at_every_length(
    server: Any, replica_ids: list[str], eventually: Callable[..., None]
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(1, 250) for _ in range(length)] for length in [*range(1, 201), 1000]]
    published = server.settled_metric("store_published", replica_ids[0])
    cold = ask_all(server, prompts, replica_ids[0])
    # At the last boundary of each prompt, and where the two tokens computed of an answer pass another.
    checkpoints = sum(
        (usable(prompt) > 0) + ((len(prompt) + 2) // BLOCK * BLOCK > usable(prompt)) for prompt in prompts
    )
    eventually(lambda: server.metric("store_published", replica_ids[0]) == published + checkpoints)
    warm = ask_all(server, prompts, replica_ids[1])

    assert {response.headers["x-warmstate-replica"] for response in cold} == {replica_ids[0]}
    assert {response.headers["x-warmstate-replica"] for response in warm} == {replica_ids[1]}
    assert [cached(response) for response in cold] == [0] * len(prompts)
    assert [cached(response) for response in warm] == [usable(prompt) for prompt in prompts]
    assert [answer(response) for response in warm] == [answer(response) for response in cold]


def test_a_local_hit_equals_the_miss_too(server: Any, replica_ids: list[str]) -> None:
    rng = random.Random(2)
    for length in (65, 128, 129, 255, 256, 257, 700):
        prompt = [rng.randrange(1, 250) for _ in range(length)]
        miss, hit = (ask(server, prompt, replica_ids[0]) for _ in range(2))
        assert (cached(miss), cached(hit)) == (0, usable(prompt))
        assert answer(hit) == answer(miss)


def test_the_router_goes_where_the_prefix_is(server: Any, replica_ids: list[str]) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(1, 250) for _ in range(300)]
    at = ask(server, prompt, replica_ids[1]).headers["x-warmstate-replica"]
    # The index learns of it by an event; until then any replica may be chosen, and would become warm itself.
    server.settled_metric("store_published")
    assert server.metric("store_events_waiting") == 0
    again = [ask(server, prompt).headers["x-warmstate-replica"] for _ in range(6)]
    assert again == [at] * 6


def usable(prompt: list[int]) -> int:
    """The last block boundary that leaves a token to compute."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def ask(server: Any, prompt: list[int], replica_id: str | None = None) -> httpx.Response:
    response: httpx.Response = server.complete(prompt, replica_id, max_tokens=3, logprobs=3, ignore_eos=True)
    assert response.status_code == 200, response.text
    return response


def ask_all(server: Any, prompts: list[list[int]], replica_id: str) -> list[httpx.Response]:
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt, replica_id), prompts))


def cached(response: httpx.Response) -> int:
    tokens: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def answer(response: httpx.Response) -> tuple[list[int], Any]:
    """Tokens and log-probabilities, to the last bit that JSON carries (it carries all)."""
    choice = response.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]
