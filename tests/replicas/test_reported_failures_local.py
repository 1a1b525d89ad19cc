"""What users of other servers reported of hybrid prefix caches, asked of one replica of ours.

`tests/reported_failures.md` lists the reports and the test of each; here are those that no other test answers.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from warmstate.cache_store.keys import chain_root, prefix_keys
from warmstate.replicas.config import CacheConfig

Build = Callable[..., Any]

BUDGETS = [64, 65, 100, 191, 448, 2048]


@pytest.fixture
def ask(run_requests: Build, request_for: Build) -> Callable[..., Any]:
    def run(engine: Any, prompt: Any, **options: Any) -> Any:
        request = request_for(prompt, **options)
        return run_requests(engine, [request])[request.request_id]

    return run


@pytest.fixture
def alone(fake_backend: Build, engine_over: Build, ask: Build) -> Callable[..., Any]:
    """The output of a prompt on a fresh replica without a cache."""

    def run(prompt: Any, **options: Any) -> Any:
        return ask(engine_over(fake_backend(), cache=CacheConfig(0, enabled=False)), prompt, **options).output

    return run


def test_a_cache_that_is_left_at_its_defaults_hits(
    fake_backend: Build, engine_over: Build, ask: Build, prompt_of: Build
) -> None:
    """0 hits of 1,131 requests without a warning (vllm #51198, #51250); retention silently 0 (vllm #53595)."""
    engine = engine_over(fake_backend(), cache=CacheConfig())
    cached = [ask(engine, prompt_of(200, seed=i % 5)).num_cached_tokens for i in range(25)]
    assert cached == [0] * 5 + [192] * 20
    assert engine.stats()["prefix_cache_hits"] == 20 * 192


def test_a_shared_prefix_of_65_tokens_hits(
    fake_backend: Build, engine_over: Build, ask: Build, prompt_of: Build
) -> None:
    """A shared prefix below one block of 528 or 2,096 tokens never hit (vllm #40696, #53749)."""
    engine = engine_over(fake_backend())
    for seed, expected in ((1, 0), (2, 64), (3, 64)):
        prompt = np.concatenate([prompt_of(65), prompt_of(30, seed=seed)])
        assert ask(engine, prompt, marks=(65,)).num_cached_tokens == expected


def test_a_prefix_that_nobody_marked_is_kept_when_the_second_request_leaves_it(
    fake_backend: Build, engine_over: Build, ask: Build, prompt_of: Build
) -> None:
    """The checkpoint lay in tokens that only one request had, and the third sighting came before any hit
    (vllm #45238)."""
    engine = engine_over(fake_backend())
    prompts = [np.concatenate([prompt_of(300), prompt_of(150, seed=1 + i)]) for i in range(4)]
    assert [ask(engine, prompt).num_cached_tokens for prompt in prompts] == [0, 0, 256, 256]


@pytest.mark.parametrize("budget", BUDGETS)
def test_budget_pressure_that_fragments_chunks_moves_no_checkpoint(
    fake_backend: Build,
    engine_over: Build,
    run_requests: Build,
    ask: Build,
    request_for: Build,
    prompt_of: Build,
    budget: int,
) -> None:
    """0 of 996k hits under load: steps no longer ended on the grid (vllm #52897)."""
    engine = engine_over(fake_backend(num_slots=8, num_blocks=200), max_batch_tokens=budget)
    loaded = request_for(prompt_of(700), marks=(300, 650))
    mates = [request_for(prompt_of(40 + 50 * i, seed=i + 1), max_tokens=30) for i in range(5)]
    run_requests(engine, [*mates[:3], loaded, *mates[3:]])
    assert ask(engine, prompt_of(700)).num_cached_tokens == 640
    assert ask(engine, [*prompt_of(600), 1]).num_cached_tokens == 256


@pytest.mark.parametrize("length", [640, 641, 700, 704])
def test_the_same_prompt_again_hits_all_but_its_last_token(
    fake_backend: Build, engine_over: Build, ask: Build, prompt_of: Build, length: int
) -> None:
    """The rule to leave one token to compute split the node, and the repetition hit 0 (sglang #21158)."""
    engine = engine_over(fake_backend())
    first, second = ask(engine, prompt_of(length)), ask(engine, prompt_of(length))
    assert second.num_cached_tokens == (length - 1) // 64 * 64
    assert first.output == second.output


def test_of_four_requests_at_once_that_share_a_prefix_three_hit(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    """3 of 4 missed (sglang #28222)."""
    engine = engine_over(fake_backend(), max_batch_tokens=128)
    prompts = [np.concatenate([prompt_of(300), prompt_of(90, seed=1 + i)]) for i in range(4)]
    results = run_requests(engine, [request_for(prompt, marks=(300, 380)) for prompt in prompts])
    assert sorted(result.num_cached_tokens for result in results.values()) == [0, 256, 256, 256]


def test_a_question_set_asked_twice_is_answered_the_same(
    torch_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    """GSM8K 0.950 in the first run and 0.485 in the second, which hit the cache (sglang #16053)."""
    engine = engine_over(torch_backend(num_slots=8))
    shots = prompt_of(260)
    questions = [np.concatenate([shots, prompt_of(20 + 19 * i, seed=1 + i)]) for i in range(6)]
    runs = []
    for _ in range(2):
        requests = [request_for(question, marks=(len(shots), len(question) - 4)) for question in questions]
        results = run_requests(engine, requests)
        runs.append([results[request.request_id] for request in requests])
    assert [result.output for result in runs[0]] == [result.output for result in runs[1]]
    assert all(result.num_cached_tokens >= 256 for result in runs[1])


def test_a_prefix_whose_state_was_evicted_is_served_again_after_its_next_computation(
    fake_backend: Build, engine_over: Build, ask: Build, alone: Build, prompt_of: Build
) -> None:
    """A state backed up but never matched again (sglang #33713); KV resident, but unservable once its state was gone
    (sglang #40680)."""
    engine = engine_over(fake_backend(num_blocks=120), cache=CacheConfig(host_bytes=6000))
    ask(engine, prompt_of(300))
    for seed in range(1, 9):
        ask(engine, prompt_of(300, seed=seed))
    assert engine.stats()["kv_blocks_resident"] >= 9 * 4
    lost, again = ask(engine, prompt_of(300)), ask(engine, prompt_of(300))
    assert (lost.num_cached_tokens, again.num_cached_tokens) == (0, 256)
    assert lost.output == again.output == alone(prompt_of(300))


@pytest.mark.parametrize("seed", range(3))
def test_every_prefix_that_a_replica_announces_is_served(
    fake_backend: Build, engine_over: Build, ask: Build, prompt_of: Build, seed: int
) -> None:
    """Events of single groups made routers believe in prefixes that nobody could serve (Infera #98, vllm #44451,
    dynamo #9376)."""
    rng = random.Random(seed)
    announced: dict[bytes, int] = {}

    def listen(key: bytes, position: int, usable: bool) -> None:
        assert (key in announced) != usable
        announced.update({key: position}) if usable else announced.pop(key)

    engine = engine_over(fake_backend(num_blocks=30), cache=CacheConfig(host_bytes=40_000), listener=listen)
    prompts = {kind: prompt_of(rng.choice([200, 330, 520, 700]), seed=kind) for kind in range(6)}
    owner = {key: kind for kind, prompt in prompts.items() for key in prefix_keys(prompt, chain_root(b"%d" % kind))}

    def ask_for(kind: int, length: int) -> Any:
        return ask(engine, prompts[kind][:length], chain_root=chain_root(b"%d" % kind))

    for _ in range(40):
        kind = rng.randrange(6)
        ask_for(kind, rng.randrange(1, len(prompts[kind])))
    assert announced
    for key, position in list(announced.items()):
        # What this question pushes out is no longer announced.
        if key in announced:
            assert ask_for(owner[key], position + 1).num_cached_tokens == position


def test_no_step_of_a_tight_replica_is_empty(
    fake_backend: Build, engine_over: Build, collect_step: Build, request_for: Build, prompt_of: Build
) -> None:
    """A request was queued again without any progress, for ever (vllm #52520)."""
    backend = fake_backend(num_slots=3, num_blocks=8)
    engine = engine_over(backend, cache=CacheConfig(host_bytes=0), max_batch_tokens=64)
    for i in range(6):
        engine.add(request_for(prompt_of(120 + 37 * i, seed=i), max_tokens=90))
    results: dict[str, Any] = {}
    computed = -1
    while collect_step(engine, results):
        assert backend.num_tokens > computed
        computed = backend.num_tokens
    assert engine.stats()["num_preemptions"] > 0
    assert [result.finish_reason for result in results.values()] == ["length"] * 6
    engine.check_integrity()


def test_a_sequence_preempted_at_any_token_goes_on_where_it_was(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build, alone: Build
) -> None:
    """Stale recurrent state after a resume (vllm-metal #488); the resumed position counted in the wrong block size
    (vllm #53142)."""
    for length in range(62, 67):
        requests = [request_for(prompt_of(length, seed=seed), max_tokens=70) for seed in range(3)]
        engine = engine_over(fake_backend(num_blocks=6))
        results = run_requests(engine, requests)
        assert engine.stats()["restores_parked"] > 0
        for seed, request in enumerate(requests):
            assert results[request.request_id].output == alone(prompt_of(length, seed=seed), max_tokens=70)
