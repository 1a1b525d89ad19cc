"""The step over an exact fake backend: batching, stopping, cancelling, failing, preempting."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from warmstate.models.errors import BackendError
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.errors import InvalidRequest, PromptTooLong
from warmstate.replicas.messages import GenerateRequest

Build = Callable[..., Any]


@pytest.fixture
def alone(fake_backend: Build, engine_over: Build, run_requests: Build) -> Callable[[GenerateRequest], Any]:
    """The result of a request on a fresh engine without a cache."""

    def run(request: GenerateRequest) -> Any:
        engine = engine_over(fake_backend(num_blocks=80), cache=CacheConfig(0, enabled=False))
        return run_requests(engine, [request])[request.request_id]

    return run


def test_a_mixed_batch_gives_each_what_it_gets_alone(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build, alone: Build
) -> None:
    requests = [
        request_for(prompt_of(5 + 37 * i, seed=i % 3), max_tokens=14 + i, temperature=(i % 2) * 0.8, seed=i)
        for i in range(16)
    ]
    backend = fake_backend(num_slots=16, num_blocks=200)
    results = run_requests(engine_over(backend, max_batch_tokens=512), requests)
    assert backend.max_rows == 16
    for request in requests:
        assert results[request.request_id].output == alone(request).output


def test_one_forward_serves_all_sequences_of_a_step(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    backend = fake_backend()
    run_requests(engine_over(backend), [request_for(prompt_of(20, seed=i), max_tokens=6) for i in range(4)])
    assert backend.num_forwards == 6


def test_slots_are_clean_whatever_their_last_holder_left(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build, alone: Build
) -> None:
    backend = fake_backend(num_slots=1)
    engine = engine_over(backend)
    backend.fill_slots_with_garbage()
    for length in (3, 70, 200):
        request = request_for(prompt_of(length, seed=length))
        assert run_requests(engine, [request])[request.request_id].output == alone(request).output
        backend.fill_slots_with_garbage()


@pytest.mark.parametrize("park", [True, False], ids=["parked", "recomputed"])
def test_preemption_changes_no_token(
    fake_backend: Build,
    engine_over: Build,
    run_requests: Build,
    request_for: Build,
    prompt_of: Build,
    alone: Build,
    park: bool,
) -> None:
    requests = [
        request_for(prompt_of(50 + 30 * i, seed=i), max_tokens=150, temperature=0.9, seed=i, frequency_penalty=0.5)
        for i in range(4)
    ]
    cache = CacheConfig(host_bytes=1 << 22) if park else CacheConfig(host_bytes=0)
    engine = engine_over(fake_backend(num_blocks=12), cache=cache)
    results = run_requests(engine, requests)
    stats = engine.stats()
    assert stats["num_preemptions"] > 0
    assert (stats.get("restores_parked", 0) > 0) == park
    assert (stats["parking_refused"] > 0) == (not park)
    for request in requests:
        assert results[request.request_id].output == alone(request).output


def test_a_parked_sequence_replays_less_than_a_block(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    requests = [request_for(prompt_of(64, seed=i), max_tokens=100) for i in range(4)]
    backend = fake_backend(num_blocks=8)
    engine = engine_over(backend)
    run_requests(engine, requests)
    num_preemptions = engine.stats()["num_preemptions"]
    assert num_preemptions > 0
    assert backend.num_tokens <= 4 * (64 + 99) + num_preemptions * 64


def test_stop_tokens_eos_and_limits_end_a_sequence(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build, alone: Build
) -> None:
    prompt = prompt_of(30)
    tokens = alone(request_for(prompt, max_tokens=10)).token_ids
    third = tokens.index(tokens[2])
    engine = engine_over(fake_backend(), eos_token_ids=frozenset({tokens[2]}))

    def ask(**options: Any) -> tuple[list[int], str]:
        request = request_for(prompt, **{"max_tokens": 10, **options})
        result = run_requests(engine, [request])[request.request_id]
        return result.token_ids, result.finish_reason

    assert ask(ignore_eos=False) == (tokens[: third + 1], "stop")
    assert ask(ignore_eos=True) == (tokens, "length")
    assert ask(ignore_eos=True, stop_token_ids=frozenset({tokens[1]})) == (
        tokens[: tokens.index(tokens[1]) + 1],
        "stop",
    )
    held_back = ask(ignore_eos=False, min_tokens=10)
    assert held_back[1] == "length"
    assert tokens[2] not in held_back[0]


def test_the_context_limit_ends_a_sequence(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    engine = engine_over(fake_backend(max_model_len=100))
    request = request_for(prompt_of(95), max_tokens=50)
    result = run_requests(engine, [request])[request.request_id]
    assert (len(result.token_ids), result.finish_reason) == (5, "length")


def test_bad_prompts_are_refused_before_they_queue(
    fake_backend: Build, engine_over: Build, request_for: Build, prompt_of: Build
) -> None:
    engine = engine_over(fake_backend(max_model_len=100))
    with pytest.raises(PromptTooLong, match=r"100 tokens.*context of 100"):
        engine.check(request_for(prompt_of(100)))
    engine.check(request_for(prompt_of(99)))
    with pytest.raises(InvalidRequest, match="vocabulary of 97"):
        engine.check(request_for([1, 97]))
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine.check(request_for([-1]))
    with pytest.raises(InvalidRequest, match="empty"):
        engine.check(request_for([]))


def test_a_pool_smaller_than_the_context_is_the_limit(fake_backend: Build, engine_over: Build) -> None:
    assert engine_over(fake_backend(num_blocks=5, max_model_len=4096)).context_limit == 256


def test_a_stream_continues_elsewhere_with_the_same_tokens(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    options: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 11,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.2,
        "min_tokens": 15,
    }
    prompt = prompt_of(150)
    whole = request_for(prompt, max_tokens=20, **options)
    expected = run_requests(engine_over(fake_backend()), [whole])[whole.request_id].token_ids
    for sent in (1, 7, 19):
        rest = request_for(
            np.concatenate([prompt, expected[:sent]]), max_tokens=20 - sent, num_output_tokens=sent, **options
        )
        result = run_requests(engine_over(fake_backend()), [rest])[rest.request_id]
        assert expected[:sent] + result.token_ids == expected


def test_unseeded_requests_differ(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    requests = [request_for(prompt_of(30), temperature=1.0, max_tokens=12) for _ in range(2)]
    results = run_requests(engine_over(fake_backend()), requests)
    assert len({tuple(result.token_ids) for result in results.values()}) == 2


def test_nan_ends_its_own_request_and_leaves_nothing_behind(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build, alone: Build
) -> None:
    backend = fake_backend()
    engine = engine_over(backend)
    poisoned, other = request_for(prompt_of(200, seed=1)), request_for(prompt_of(150, seed=2))
    backend.poison = lambda sequence_id: sequence_id == 0
    results = run_requests(engine, [poisoned, other])
    failed = results[poisoned.request_id]
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert "NaN" in (failed.error or "")
    assert results[other.request_id].output == alone(other).output
    backend.poison = lambda sequence_id: False
    again = dataclasses.replace(poisoned, request_id="again")
    result = run_requests(engine, [again])["again"]
    assert result.num_cached_tokens == 0
    assert result.output == alone(poisoned).output


def test_blocks_of_earlier_chunks_cannot_be_found_after_nan(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    backend = fake_backend()
    backend.poison = lambda sequence_id: True
    engine = engine_over(backend, max_batch_tokens=128)
    run_requests(engine, [request_for(prompt_of(300))])
    assert backend.num_forwards == 3
    assert engine.stats()["kv_blocks_resident"] == 0


def test_a_backend_fault_fails_the_step_and_not_the_engine(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build, alone: Build
) -> None:
    class Faulty(fake_backend):  # type: ignore[misc, valid-type]
        fails = True

        def forward(self, plan: Any, tokens: Any) -> Any:
            if self.fails:
                raise BackendError("out of luck")
            return super().forward(plan, tokens)

    backend = Faulty()
    engine = engine_over(backend)
    request = request_for(prompt_of(100))
    result = run_requests(engine, [request])[request.request_id]
    assert result.finish_reason == "error"
    assert "out of luck" in (result.error or "")
    backend.fails = False
    again = dataclasses.replace(request, request_id="again")
    assert run_requests(engine, [again])["again"].output == alone(request).output


def test_an_aborted_prefill_leaves_no_checkpoint_that_was_never_computed(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build, alone: Build
) -> None:
    engine = engine_over(fake_backend(), max_batch_tokens=128)
    prompt = prompt_of(600)
    engine.add(request_for(prompt, request_id="aborted", marks=(70, 590)))
    engine.step()
    engine.cancel("aborted")
    engine.check_integrity()
    retry = request_for(prompt, marks=(70, 590))
    result = run_requests(engine, [retry])[retry.request_id]
    assert result.num_cached_tokens == 64
    assert result.output == alone(retry).output


def test_cancelling_a_parked_sequence_frees_its_state(
    fake_backend: Build, engine_over: Build, request_for: Build, prompt_of: Build
) -> None:
    engine = engine_over(fake_backend(num_blocks=6))
    for name in ("old", "young"):
        engine.add(request_for(prompt_of(100), request_id=name, chain_root=name.encode(), max_tokens=150))
    while engine.stats()["num_preemptions"] == 0:
        engine.step()
    assert engine.stats()["parked_bytes"] > 0
    engine.cancel("young")
    assert engine.stats()["parked_bytes"] == 0
    engine.cancel("old")
    engine.check_integrity()


def test_cancelling_what_is_unknown_is_no_error(fake_backend: Build, engine_over: Build) -> None:
    engine = engine_over(fake_backend())
    engine.cancel("nobody")
    assert engine.step() is None


def test_a_burst_of_twins_computes_its_prefix_once(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build, alone: Build
) -> None:
    backend = fake_backend()
    engine = engine_over(backend, max_batch_tokens=128)
    requests = [request_for(prompt_of(500), max_tokens=2) for _ in range(4)]
    results = run_requests(engine, requests)
    expected = alone(requests[0]).output
    assert all(result.output == expected for result in results.values())
    assert sorted(result.num_cached_tokens for result in results.values()) == [0, 448, 448, 448]
    assert backend.num_tokens == 500 + 3 * 52 + 4
    assert engine.stats()["twin_waits"] == 3


def test_twins_go_on_when_their_leader_is_cancelled(
    fake_backend: Build, engine_over: Build, collect_step: Build, request_for: Build, prompt_of: Build, alone: Build
) -> None:
    engine = engine_over(fake_backend(), max_batch_tokens=128)
    engine.add(request_for(prompt_of(500), request_id="leader"))
    follower = request_for(prompt_of(500))
    engine.add(follower)
    engine.step()
    engine.cancel("leader")
    results: dict[str, Any] = {}
    while collect_step(engine, results):
        pass
    engine.check_integrity()
    assert results[follower.request_id].output == alone(follower).output


def test_twins_whose_checkpoint_cannot_be_kept_do_not_run_one_after_another(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    backend = fake_backend()
    engine = engine_over(backend, cache=CacheConfig(host_bytes=16), max_batch_tokens=2048)
    run_requests(engine, [request_for(prompt_of(500), max_tokens=1) for _ in range(4)])
    assert backend.num_forwards == 2


def test_different_salts_share_nothing(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    engine = engine_over(fake_backend())
    mine = request_for(prompt_of(300), chain_root=b"a" * 32)
    yours = request_for(prompt_of(300), chain_root=b"b" * 32)
    run_requests(engine, [mine])
    assert run_requests(engine, [yours])[yours.request_id].num_cached_tokens == 0


def test_metrics_count_tokens_exactly(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    engine = engine_over(fake_backend())
    for _ in range(2):
        run_requests(engine, [request_for(prompt_of(300), max_tokens=3)])
    stats = engine.stats()
    expected = {
        "prompt_tokens": 600,
        "generation_tokens": 6,
        "prefix_cache_queries": 600,
        "prefix_cache_hits": 256,
        "request_success_length": 2,
        "engine_step_tokens": 300 + 44 + 4,
        "restores_device": 1,
        "num_requests_running": 0,
        "kv_cache_usage_perc": 0,
    }
    assert {name: stats[name] for name in expected} == expected


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_and_cancels_over_small_pools_stay_exact(
    fake_backend: Build,
    engine_over: Build,
    request_for: Build,
    prompt_of: Build,
    collect_step: Build,
    alone: Build,
    seed: int,
) -> None:
    rng = random.Random(seed)
    backend = fake_backend(num_slots=3, num_blocks=rng.choice([12, 16, 30]))
    engine = engine_over(backend, cache=CacheConfig(rng.choice([4096, 40_000, 1 << 22])), max_batch_tokens=192)
    requests: dict[str, GenerateRequest] = {}
    results: dict[str, Any] = {}
    cancelled: set[str] = set()
    for _ in range(120):
        if rng.random() < 0.25 and len(requests) < 25:
            prompt = np.concatenate(
                [
                    prompt_of(rng.choice([0, 100, 200, 300]), seed=rng.randrange(2)),
                    prompt_of(rng.randrange(1, 150), seed=rng.randrange(3)),
                ]
            )
            marks = tuple(rng.sample(range(len(prompt)), min(len(prompt), rng.randrange(3))))
            request = request_for(prompt, max_tokens=rng.randrange(1, 90), temperature=0.8, seed=1, marks=marks)
            engine.check(request)
            engine.add(request)
            requests[request.request_id] = request
        if rng.random() < 0.08 and requests:
            name = rng.choice(sorted(requests))
            engine.cancel(name)
            if name not in results or results[name].finish_reason is None:
                cancelled.add(name)
        collect_step(engine, results)
        engine.check_integrity()
    while collect_step(engine, results):
        pass
    engine.check_integrity()
    finished = [name for name in requests if name not in cancelled]
    assert len(finished) > 10
    for name in finished:
        assert results[name].finish_reason == "length"
        assert results[name].output == alone(requests[name]).output
