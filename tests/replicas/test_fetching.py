"""Fetching beside a running engine: when it is worth it, what is shared, what it may hold, and how it fails."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import Dropped, Exists, Hit, Miss, MissReason, Part, Ready, Stored
from warmstate.replicas.config import CacheConfig

Build = Callable[..., Any]


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class MeasuredStore:
    """A memory store whose every read takes `read_s` of the clock; nothing is answered while `stalled` is set, nor what
    `holds` names."""

    def __init__(self, inner: MemoryStore, clock: Clock) -> None:
        self.inner = inner
        self.clock = clock
        self.read_s = 0.0
        self.stalled = False
        self.holds: Callable[[ObjectKey], bool] = lambda key: False
        self.refuse: Callable[[ObjectKey], Miss | None] = lambda key: None
        self.gets: list[ObjectKey] = []
        self.puts: list[ObjectKey] = []

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        self.gets.append(key)
        while self.stalled or self.holds(key):
            await asyncio.sleep(0.005)
        self.clock.now_s += self.read_s
        return self.refuse(key) or await self.inner.get(key, into)

    async def prepare(self, needed: Sequence[ObjectKey], num_bytes: int, ttl_s: int | None = None) -> Ready | Dropped:
        return await self.inner.prepare(needed, num_bytes, ttl_s)

    async def put(
        self, key: ObjectKey, parts: Mapping[str, Part], ttl_s: int | None = None
    ) -> Stored | Exists | Dropped:
        self.puts.append(key)
        while self.stalled:
            await asyncio.sleep(0.005)
        return await self.inner.put(key, parts)

    async def delete(self, key: ObjectKey) -> None:
        await self.inner.delete(key)

    async def close(self) -> None:
        await self.inner.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(sharing: Any, clock: Clock) -> MeasuredStore:
    return MeasuredStore(sharing.memory, clock)


@pytest.fixture
def replica(
    fake_backend: Build, engine_over: Build, sharing: Any, store: MeasuredStore, clock: Clock
) -> Callable[..., tuple[Any, Any]]:
    """A new replica and its link; `cache` are fields of `CacheConfig`."""

    def build(num_slots: int = 4, fetch_policy: str = "auto", **cache: Any) -> tuple[Any, Any]:
        backend = fake_backend(num_slots=num_slots, num_blocks=150)
        link = sharing.link(backend, store, clock=clock, timeout_s=60)
        config = CacheConfig(**{"host_bytes": 1 << 23, **cache})
        return engine_over(backend, link=link, cache=config, fetch_policy=fetch_policy), link

    return build


@pytest.fixture
def prompts(prompt_of: Build) -> list[Any]:
    """Four prompts that share nothing, then two that share 520 tokens."""
    apart = [prompt_of(600, seed=seed) for seed in range(1, 5)]
    return [*apart, prompt_of(600), np.concatenate([prompt_of(520), prompt_of(100, seed=9)])]


@pytest.fixture
def expected(replica: Build, run_requests: Build, request_for: Build, prompts: list[Any], sharing: Any) -> list[Any]:
    """What a first replica answered to each of `prompts`, all of them published."""
    engine, link = replica()
    results = []
    for prompt in prompts:
        request = request_for(prompt)
        results.append(run_requests(engine, [request])[request.request_id])
    sharing.drain(link)
    return results


@pytest.fixture
def ask(run_requests: Build, request_for: Build) -> Callable[..., Any]:
    def run(engine: Any, *prompts: Any) -> list[Any]:
        requests = [request_for(prompt) for prompt in prompts]
        results = run_requests(engine, requests)
        return [results[request.request_id] for request in requests]

    return run


def reasons(engine: Any) -> dict[str, int]:
    prefix = "store_fetch_decisions_"
    return {name.removeprefix(prefix): n for name, n in engine.stats().items() if name.startswith(prefix) and n}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.002)


def finish(engine: Any, collect_step: Build, requests: list[Any], results: dict[str, Any]) -> list[Any]:
    while not all(request.request_id in results and results[request.request_id].finish_reason for request in requests):
        if not collect_step(engine, results):
            engine.wait_for_work()
    engine.check_integrity()
    return [results[request.request_id] for request in requests]


def test_a_slow_store_is_tried_once_then_avoided_and_probed_when_the_measurement_is_old(
    replica: Build,
    ask: Build,
    request_for: Build,
    collect_step: Build,
    prompts: list[Any],
    expected: list[Any],
    store: MeasuredStore,
    clock: Clock,
) -> None:
    engine, link = replica()
    store.read_s = 1000.0
    (first,) = ask(engine, prompts[0])
    assert (first.num_cached_tokens, reasons(engine)) == (576, {"unmeasured": 1})
    (second,) = ask(engine, prompts[1])
    assert (second.num_cached_tokens, second.output) == (0, expected[1].output)
    assert reasons(engine) == {"unmeasured": 1, "computes_sooner": 1}
    clock.now_s += 31
    store.read_s, store.stalled = 0.0, True
    requests = [request_for(prompt) for prompt in prompts[2:4]]
    for request in requests:
        engine.add(request)
    results: dict[str, Any] = {}
    assert collect_step(engine, results), "the one that does not probe runs"
    store.stalled = False
    probe, beside = finish(engine, collect_step, requests, results)
    assert (probe.num_cached_tokens, beside.num_cached_tokens) == (576, 0)
    assert reasons(engine) == {"unmeasured": 1, "computes_sooner": 2, "probe": 1}
    assert [probe.output, beside.output] == [expected[2].output, expected[3].output]
    assert link.stats()["fetch_hits"] == 2


def test_a_store_that_has_become_fast_is_used_again(
    replica: Build, ask: Build, prompts: list[Any], expected: list[Any], store: MeasuredStore, clock: Clock
) -> None:
    engine, link = replica()
    store.read_s = 1000.0
    ask(engine, prompts[0])
    store.read_s = 0.0
    clock.now_s += 1e6
    ask(engine, prompts[1])
    assert link.transfer_rate.seconds(10_000, 0) < 1e-3
    assert ask(engine, prompts[2])[0].cache_source == "store"
    assert reasons(engine) == {"unmeasured": 1, "probe": 1, "pays": 1}


@pytest.mark.parametrize(("policy", "cached"), [("always", 576), ("never", 0)])
def test_the_policy_can_be_fixed(
    replica: Build, ask: Build, prompts: list[Any], expected: list[Any], store: MeasuredStore, policy: str, cached: int
) -> None:
    engine, _ = replica(fetch_policy=policy)
    store.read_s = 1000.0
    for prompt, before in zip(prompts[:3], expected, strict=False):
        (result,) = ask(engine, prompt)
        assert (result.num_cached_tokens, result.output) == (cached, before.output)
    assert reasons(engine) == {policy: 3}


def test_the_estimates_are_told_once_measured(
    replica: Build, ask: Build, prompts: list[Any], expected: list[Any], store: MeasuredStore
) -> None:
    engine, _ = replica()
    figures = ("prefill_tokens_per_s", "store_bytes_per_s", "store_latency_ms")
    assert not engine.stats().keys() & set(figures)
    store.read_s = 0.25
    ask(engine, prompts[0])
    ask(engine, prompts[1][:200])
    stats = engine.stats()
    assert all(stats[name] >= 0 for name in figures)
    assert stats["store_bytes_per_s"] < 1e6
    assert stats["prefill_tokens_per_s"] > 0


def test_every_request_tells_its_decision_in_the_debug_log(
    replica: Build, ask: Build, prompts: list[Any], expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = replica()
    with caplog.at_level(logging.DEBUG, logger="warmstate.replicas.cache"):
        ask(engine, prompts[0])
        ask(engine, prompts[0])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "fetch 576 (unmeasured): tokens=600 local=0 stored=576:" in lines[0]
    assert "no fetch (nothing_stored): tokens=600 local=576" in lines[1]
    assert lines[1].endswith("starts at 576")


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (MissReason.UNAVAILABLE, "; the fetch failed: unavailable;"),
        (MissReason.ABSENT, "; the fetch failed: absent kv at"),
    ],
)
def test_a_fetch_that_failed_is_told_with_the_reason(
    replica: Build,
    ask: Build,
    prompts: list[Any],
    expected: list[Any],
    store: MeasuredStore,
    caplog: pytest.LogCaptureFixture,
    reason: MissReason,
    told: str,
) -> None:
    engine, _ = replica()
    store.refuse = lambda key: Miss(reason) if key.kind == "kv" else None
    with caplog.at_level(logging.DEBUG, logger="warmstate.replicas.cache"):
        ask(engine, prompts[0])
    (line,) = [record.getMessage() for record in caplog.records]
    assert told in line
    assert line.endswith("starts at 0")


def test_kv_that_two_sequences_share_is_read_once(
    replica: Build,
    request_for: Build,
    collect_step: Build,
    prompts: list[Any],
    expected: list[Any],
    store: MeasuredStore,
    sharing: Any,
) -> None:
    engine, link = replica()
    store.holds = lambda key: key.kind == "kv"
    requests = [request_for(prompt) for prompt in prompts[4:]]
    for request in requests:
        engine.add(request)
    assert engine.step() is None
    wait_for(lambda: link.stats()["fetch_objects_joined"] == 2)
    store.holds = lambda key: False
    results = finish(engine, collect_step, requests, {})
    assert [result.num_cached_tokens for result in results] == [576, 576]
    assert [result.output for result in results] == [before.output for before in expected[4:]]
    read = [(key.kind, key.position, key.group) for key in store.gets]
    assert sorted(read) == [("ck", 576, g) for g in (0, 0, 1, 1)] + [("kv", 256, 0), ("kv", 512, 0)]
    assert link.stats()["fetch_objects_joined"] == 2


@pytest.mark.parametrize("which", [0, 1])
def test_a_cancelled_sequence_does_not_take_a_shared_read_from_the_other(
    replica: Build,
    request_for: Build,
    collect_step: Build,
    prompts: list[Any],
    expected: list[Any],
    store: MeasuredStore,
    sharing: Any,
    which: int,
) -> None:
    engine, link = replica()
    store.stalled = True
    requests = [request_for(prompt) for prompt in prompts[4:]]
    for request in requests:
        engine.add(request)
    assert engine.step() is None
    engine.cancel(requests[which].request_id)
    store.stalled = False
    (result,) = finish(engine, collect_step, [requests[1 - which]], {})
    assert (result.num_cached_tokens, result.output) == (576, expected[5 - which].output)
    sharing.drain(link)
    engine.run_posted()
    engine.check_integrity()
    assert engine.stats()["store_fetch_held_bytes"] == 0


def test_a_shared_read_that_fails_is_one_miss_for_each_and_nothing_of_it_is_kept(
    replica: Build,
    request_for: Build,
    collect_step: Build,
    prompts: list[Any],
    expected: list[Any],
    store: MeasuredStore,
    sharing: Any,
) -> None:
    engine, link = replica()
    store.refuse = lambda key: Miss(MissReason.CORRUPT) if (key.kind, key.position) == ("kv", 256) else None
    requests = [request_for(prompt) for prompt in prompts[4:]]
    for request in requests:
        engine.add(request)
    assert engine.step() is None
    sharing.drain(link)
    engine.run_posted()
    assert engine.stats()["host_objects"] == 0
    assert engine.stats()["store_fetch_held_bytes"] == 0
    # At 512 the two prompts part.
    assert sorted(sharing.index.removed) == [512, 576, 576]
    results = finish(engine, collect_step, requests, {})
    assert [result.output for result in results] == [before.output for before in expected[4:]]
    assert link.stats()["fetch_misses_corrupt"] == 2
    assert reasons(engine) == {"unmeasured": 2}


def test_a_failed_load_is_never_looked_up_again_by_the_same_request(
    replica: Build, ask: Build, prompts: list[Any], expected: list[Any], store: MeasuredStore
) -> None:
    """The index still has the row, for the store was only away: without an end to it the request would loop."""
    engine, link = replica(fetch_policy="always")
    store.refuse = lambda key: Miss(MissReason.UNAVAILABLE)
    (result,) = ask(engine, prompts[0])
    assert (result.num_cached_tokens, result.output) == (0, expected[0].output)
    assert len(store.gets) == 2
    assert link.stats()["fetch_misses_unavailable"] == 1


def test_what_waits_for_room_in_flight_is_counted_and_served(
    replica: Build,
    request_for: Build,
    collect_step: Build,
    prompts: list[Any],
    expected: list[Any],
    store: MeasuredStore,
    sharing: Any,
) -> None:
    engine, _ = replica(max_in_flight_bytes=15_000)
    store.stalled = True
    requests = [request_for(prompt) for prompt in prompts[:3]]
    for request in requests:
        engine.add(request)
    assert engine.step() is None
    assert engine.step() is None
    stats = engine.stats()
    assert (stats["store_fetches_in_flight"], stats["store_fetch_waits_for_room"]) == (1, 2)
    assert 7_500 < stats["store_fetch_held_bytes"] <= 15_000
    store.stalled = False
    results = finish(engine, collect_step, requests, {})
    assert [result.num_cached_tokens for result in results] == [576] * 3
    assert [result.output for result in results] == [before.output for before in expected[:3]]
    assert engine.stats()["store_fetch_held_bytes"] == 0


def test_a_prefix_larger_than_what_may_be_in_flight_comes_into_the_host_tier(
    replica: Build, ask: Build, prompts: list[Any], expected: list[Any], store: MeasuredStore, request_for: Build
) -> None:
    engine, _ = replica(max_in_flight_bytes=5_000)
    store.stalled = True
    request = request_for(prompts[1])
    engine.add(request)
    assert engine.step() is None
    stats = engine.stats()
    assert (stats["store_fetches_in_flight"], stats["store_fetch_held_bytes"]) == (1, 0)
    assert stats["host_bytes"] > 5_000, "the budget of the host tier is taken before anything is read"
    engine.cancel(request.request_id)
    store.stalled = False
    (result,) = ask(engine, prompts[0])
    assert (result.num_cached_tokens, result.cache_source, result.output) == (576, "store", expected[0].output)


def test_the_room_of_a_large_prefix_that_does_not_come_is_free_again(
    replica: Build, ask: Build, prompts: list[Any], expected: list[Any], store: MeasuredStore
) -> None:
    engine, _ = replica(max_in_flight_bytes=5_000)
    store.refuse = lambda key: Miss(MissReason.TIMEOUT)
    (result,) = ask(engine, prompts[0])
    assert (result.num_cached_tokens, result.output) == (0, expected[0].output)
    held = engine.stats()["host_bytes"]
    engine, _ = replica(max_in_flight_bytes=5_000, fetch_policy="never")
    ask(engine, prompts[0])
    assert held == engine.stats()["host_bytes"]


def test_a_prefix_that_neither_memory_could_hold_is_computed(
    replica: Build, ask: Build, prompts: list[Any], expected: list[Any]
) -> None:
    engine, _ = replica(max_in_flight_bytes=5_000, host_bytes=6_000)
    (result,) = ask(engine, prompts[0])
    assert (result.num_cached_tokens, result.output) == (0, expected[0].output)
    assert reasons(engine) == {"too_large": 1}


def test_what_was_fetched_counts_until_its_sequence_runs_or_ends(
    replica: Build,
    request_for: Build,
    prompts: list[Any],
    expected: list[Any],
    sharing: Any,
    store: MeasuredStore,
) -> None:
    engine, link = replica(num_slots=1)
    store.stalled = True
    waiting = request_for(prompts[1])
    engine.add(waiting)
    assert engine.step() is None
    running = request_for(prompts[0][:50], max_tokens=64)
    engine.add(running)
    assert engine.step()
    store.stalled = False
    sharing.drain(link)
    assert engine.step()
    assert engine.stats()["store_fetches_in_flight"] == 0
    assert engine.stats()["store_fetch_held_bytes"] > 0
    engine.cancel(waiting.request_id)
    assert engine.stats()["store_fetch_held_bytes"] == 0
    engine.cancel(running.request_id)
    engine.check_integrity()


def test_a_sequence_that_runs_no_longer_holds_what_was_fetched_for_it(
    replica: Build, request_for: Build, collect_step: Build, prompts: list[Any], expected: list[Any], sharing: Any
) -> None:
    engine, link = replica()
    request = request_for(prompts[0], max_tokens=16)
    engine.add(request)
    assert engine.step() is None
    sharing.drain(link)
    results: dict[str, Any] = {}
    assert collect_step(engine, results)
    assert engine.stats()["num_requests_running"] == 1
    assert engine.stats()["store_fetch_held_bytes"] == 0
    finish(engine, collect_step, [request], results)


def test_two_checkpoints_under_way_send_their_common_kv_once(
    replica: Build, run_requests: Build, request_for: Build, prompts: list[Any], store: MeasuredStore, sharing: Any
) -> None:
    engine, link = replica()
    store.stalled = True
    run_requests(engine, [request_for(prompt) for prompt in prompts[4:]])
    wait_for(lambda: len(store.puts) >= 1)
    store.stalled = False
    sharing.drain(link)
    put = [(key.kind, key.position) for key in store.puts]
    assert (put.count(("kv", 256)), put.count(("kv", 512)), put.count(("ck", 576))) == (1, 1, 4)
    assert sorted(sharing.index.positions.values()) == [512, 576, 576]


def test_a_prefix_that_is_fetched_and_copied_at_once_has_room_once(
    fake_backend: Build,
    engine_over: Build,
    sharing: Any,
    store: MeasuredStore,
    request_for: Build,
    prompt_of: Build,
    collect_step: Build,
    run_requests: Build,
) -> None:
    """The end of an answer is promised to nobody: who fetches it from the store may meet it as it is copied."""
    copies: list[Callable[[], None]] = []

    class Later:
        def run(self, work: Any, done: Any, post: Any) -> None:
            copies.append(lambda: (work(), post(done))[1])

    def replica(**options: Any) -> tuple[Any, Any]:
        backend = fake_backend(num_blocks=150)
        link = sharing.link(backend, store, timeout_s=60)
        cache = CacheConfig(1 << 23, max_in_flight_bytes=100)
        return engine_over(backend, link=link, cache=cache, **options), link

    ahead, link = replica()
    answered = request_for(prompt_of(300), max_tokens=300)
    answer = run_requests(ahead, [answered])[answered.request_id].token_ids
    sharing.drain(link)
    engine, _ = replica(copier=Later())
    first = request_for(prompt_of(300), max_tokens=300)
    second = request_for([*prompt_of(300), *answer, 1, 2])
    results: dict[str, Any] = {}
    engine.add(first)
    while first.request_id not in results or len(results[first.request_id].token_ids) < 290:
        if not collect_step(engine, results):
            engine.wait_for_work()
    store.stalled = True
    engine.add(second)
    collect_step(engine, results)
    assert engine.stats()["store_fetches_in_flight"] == 1
    while results[first.request_id].finish_reason is None:
        collect_step(engine, results)
    assert engine.stats()["checkpoints_in_copy"] > 0
    store.refuse = lambda key: Miss(MissReason.TIMEOUT)
    store.stalled = False
    assert engine.wait_for_work(30)
    while copies or len(results) < 2 or results[second.request_id].finish_reason is None:
        if not collect_step(engine, results):
            copies.pop(0)()
    engine.run_posted()
    engine.check_integrity()
    assert results[second.request_id].error is None
