"""Prefixes through the shared store: what is fetched and published, and that a bad store is only a cold start."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import Dropped, DropReason, Exists, Hit, Miss, MissReason, Part, Ready, Stored
from warmstate.replicas.config import CacheConfig

Build = Callable[..., Any]


class TroubledStore:
    """A memory store in front of which things go wrong: `refuse_get` and `refuse_put` may answer in its place, and
    nothing is answered while `stalled` is set."""

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner
        self.refuse_get: Callable[[ObjectKey], Miss | None] = lambda key: None
        self.refuse_put: Callable[[ObjectKey], Dropped | None] = lambda key: None
        self.stalled = False
        self.gets: list[ObjectKey] = []
        self.puts: list[ObjectKey] = []

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        self.gets.append(key)
        while self.stalled:
            await asyncio.sleep(0.01)
        return self.refuse_get(key) or await self.inner.get(key, into)

    async def prepare(self, needed: Sequence[ObjectKey], num_bytes: int, ttl_s: int | None = None) -> Ready | Dropped:
        return await self.inner.prepare(needed, num_bytes, ttl_s)

    async def put(
        self, key: ObjectKey, parts: Mapping[str, Part], ttl_s: int | None = None
    ) -> Stored | Exists | Dropped:
        while self.stalled:
            await asyncio.sleep(0.01)
        self.puts.append(key)
        return self.refuse_put(key) or await self.inner.put(key, parts, ttl_s)

    async def delete(self, key: ObjectKey) -> None:
        await self.inner.delete(key)

    async def close(self) -> None:
        await self.inner.close()


@pytest.fixture
def replica(fake_backend: Build, engine_over: Build, sharing: Any) -> Callable[..., tuple[Any, Any]]:
    """A new replica and its link to a store."""

    def build(store: Any = None, cache: CacheConfig | None = None, **options: Any) -> tuple[Any, Any]:
        backend = fake_backend(num_blocks=100)
        link = sharing.link(backend, store, **options)
        return engine_over(backend, link=link, cache=cache or CacheConfig(1 << 22)), link

    return build


@pytest.fixture
def troubled(sharing: Any) -> TroubledStore:
    return TroubledStore(sharing.memory)


@pytest.fixture
def ask(run_requests: Build, request_for: Build, prompt_of: Build) -> Callable[..., Any]:
    def run(engine: Any, length: int = 600, **options: Any) -> Any:
        request = request_for(prompt_of(length), **options)
        return run_requests(engine, [request])[request.request_id]

    return run


@pytest.fixture
def published(replica: Build, sharing: Any, ask: Build) -> Any:
    """The result of a first replica, which has published its checkpoint at 576."""
    engine, link = replica()
    result = ask(engine)
    sharing.drain(link)
    assert sharing.index.positions
    return result


def test_a_cold_replica_fetches_once_and_then_hits_its_own_tiers(replica: Build, ask: Build, published: Any) -> None:
    engine, link = replica()
    first, second = ask(engine), ask(engine)
    assert (first.num_cached_tokens, first.cache_source) == (576, "store")
    assert (second.num_cached_tokens, second.cache_source) == (576, "device")
    assert first.output == second.output == published.output
    assert link.stats()["fetch_hits"] == 1


def test_a_fetched_prefix_is_used_even_where_the_host_tier_cannot_keep_it(
    replica: Build, ask: Build, published: Any
) -> None:
    engine, _ = replica(cache=CacheConfig(host_bytes=64))
    result = ask(engine)
    assert (result.num_cached_tokens, result.cache_source) == (576, "store")
    assert result.output == published.output


def test_a_replica_that_shares_part_of_the_path_fetches_only_what_it_lacks(
    replica: Build, ask: Build, published: Any, troubled: TroubledStore
) -> None:
    engine, _ = replica(troubled)
    ask(engine, 400)
    troubled.gets.clear()
    result = ask(engine)
    assert (result.num_cached_tokens, result.cache_source) == (576, "store")
    assert result.output == published.output
    assert sorted({(key.kind, key.position) for key in troubled.gets}) == [("ck", 576), ("kv", 512)]


def test_what_was_local_counts_as_local_although_the_rest_came_from_the_store(
    replica: Build, ask: Build, published: Any
) -> None:
    """vLLM asks its connector, and counts as its hit, what lies beyond the local hit."""
    engine, _ = replica()
    ask(engine, 400)
    before = engine.stats()
    assert (before["external_prefix_cache_queries"], before["prefix_cache_hits"]) == (400, 0)
    assert ask(engine).cache_source == "store"
    moved = {name: value - before[name] for name, value in engine.stats().items() if "prefix_cache" in name}
    assert moved == {
        "prefix_cache_queries": 600,
        "prefix_cache_hits": 384,
        "external_prefix_cache_queries": 600 - 384,
        "external_prefix_cache_hits": 576 - 384,
    }


def test_kv_is_published_before_the_checkpoint_and_once(
    replica: Build, ask: Build, sharing: Any, troubled: TroubledStore
) -> None:
    engine, link = replica(troubled)
    ask(engine, 600)
    ask(engine, 900)
    sharing.drain(link)
    places = [(key.kind, key.position) for key in troubled.puts]
    assert places == [
        ("kv", 256), ("kv", 512), ("ck", 576), ("ck", 576), ("kv", 768), ("ck", 896), ("ck", 896),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["ck", "kv"])
@pytest.mark.parametrize("reason", [MissReason.CORRUPT, MissReason.ABSENT, MissReason.LAYOUT])
def test_one_bad_object_is_one_full_miss_and_corrects_the_index(
    replica: Build, ask: Build, published: Any, sharing: Any, troubled: TroubledStore, kind: str, reason: MissReason
) -> None:
    troubled.refuse_get = lambda key: (
        Miss(reason) if key.kind == kind and (key.group == 1 or key.position == 512) else None
    )
    engine, link = replica(troubled)
    result = ask(engine)
    assert (result.num_cached_tokens, result.cache_source) == (0, "none")
    assert result.output == published.output
    assert link.stats()[f"fetch_misses_{reason}"] == 1
    sharing.drain(link)
    assert 576 in sharing.index.removed
    # The replica computed and published what the store had lost.
    assert list(sharing.index.positions.values()) == [576]
    troubled.refuse_get = lambda key: None
    third, _ = replica(troubled)
    assert ask(third).cache_source == "store"


@pytest.mark.parametrize("reason", [MissReason.UNAVAILABLE, MissReason.BREAKER_OPEN, MissReason.TIMEOUT])
def test_a_store_that_is_away_costs_one_miss_and_keeps_the_index(
    replica: Build, ask: Build, published: Any, sharing: Any, troubled: TroubledStore, reason: MissReason
) -> None:
    troubled.refuse_get = lambda key: Miss(reason)
    troubled.refuse_put = lambda key: Dropped(DropReason.UNAVAILABLE)
    engine, link = replica(troubled)
    result = ask(engine)
    assert result.num_cached_tokens == 0
    assert result.output == published.output
    sharing.drain(link)
    stats = link.stats()
    assert stats[f"fetch_misses_{reason}"] == 1
    assert stats["publish_dropped_unavailable"] == 1
    assert list(sharing.index.positions.values()) == [576]


def test_a_stalled_store_delays_nobody_but_who_waits_for_it(
    replica: Build,
    published: Any,
    sharing: Any,
    troubled: TroubledStore,
    run_requests: Build,
    request_for: Build,
    prompt_of: Build,
    collect_step: Build,
) -> None:
    troubled.stalled = True
    engine, link = replica(troubled, timeout_s=0.5)
    waits, other = request_for(prompt_of(600)), request_for(prompt_of(50, seed=8), max_tokens=3)
    engine.add(waits)
    engine.add(other)
    results: dict[str, Any] = {}
    while collect_step(engine, results):
        pass
    assert results[other.request_id].finish_reason == "length"
    assert waits.request_id not in results
    while not (results.get(waits.request_id) and results[waits.request_id].finish_reason):
        if not collect_step(engine, results):
            engine.wait_for_work()
    assert results[waits.request_id].output == published.output
    assert results[waits.request_id].num_cached_tokens == 0
    assert link.stats()["fetch_misses_timeout"] == 1
    troubled.stalled = False
    sharing.drain(link)
    engine.check_integrity()


def test_a_store_that_raises_keeps_nobody_waiting(
    replica: Build, ask: Build, published: Any, troubled: TroubledStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(key: ObjectKey) -> Miss | None:
        raise RuntimeError("not in the Protocol")

    troubled.refuse_get = fail
    engine, link = replica(troubled)
    result = ask(engine)
    assert (result.num_cached_tokens, result.output) == (0, published.output)
    assert link.stats()["fetch_misses_unavailable"] == 1
    assert "not in the Protocol" in caplog.text


def test_a_checkpoint_that_the_store_did_not_take_is_offered_again_by_whoever_starts_from_it(
    replica: Build, ask: Build, sharing: Any, troubled: TroubledStore
) -> None:
    troubled.refuse_put = lambda key: Dropped(DropReason.UNAVAILABLE)
    engine, link = replica(troubled)
    first = ask(engine)
    sharing.drain(link)
    assert (link.stats()["publish_dropped_unavailable"], link.stats()["published"]) == (1, 0)
    troubled.refuse_put = lambda key: None
    assert ask(engine).output == first.output
    sharing.drain(link)
    assert link.stats()["published"] == 1
    # It is known to be there now.
    ask(engine)
    sharing.drain(link)
    assert link.stats()["published"] == 1
    fetching, fetching_link = replica()
    fetched = ask(fetching)
    assert (fetched.cache_source, fetched.output) == ("store", first.output)
    sharing.drain(fetching_link)
    assert fetching_link.stats()["published"] == 0, "what has just been read there is not offered"


def test_publishing_beyond_the_bound_is_dropped_and_counted(
    replica: Build, ask: Build, sharing: Any, troubled: TroubledStore
) -> None:
    troubled.stalled = True
    engine, link = replica(troubled, max_publish_bytes=8_000)
    ask(engine, 600)
    assert 0 < link.stats()["publish_bytes"] <= 8_000
    ask(engine, 900)
    assert link.stats()["publish_dropped_no_room"] == 1
    troubled.stalled = False
    sharing.drain(link)
    assert link.stats()["publish_bytes"] == 0
    assert list(sharing.index.positions.values()) == [576]


def test_a_dropped_object_hides_the_whole_checkpoint(
    replica: Build, ask: Build, sharing: Any, troubled: TroubledStore
) -> None:
    troubled.refuse_put = lambda key: Dropped(DropReason.NO_ROOM) if key.group == 1 else None
    engine, link = replica(troubled)
    ask(engine)
    sharing.drain(link)
    assert sharing.index.positions == {}
    assert link.stats()["publish_dropped_no_room"] == 1


@pytest.mark.parametrize(("sizes", "num_fetches"), [({"num_slots": 3}, 3), ({"num_slots": 9, "num_blocks": 20}, 2)])
def test_a_queue_does_not_fetch_more_at_once_than_could_run(
    fake_backend: Build,
    engine_over: Build,
    replica: Build,
    run_requests: Build,
    collect_step: Build,
    request_for: Build,
    prompt_of: Build,
    sharing: Any,
    troubled: TroubledStore,
    sizes: dict[str, int],
    num_fetches: int,
) -> None:
    requests = [request_for(prompt_of(600, seed=seed)) for seed in range(8)]
    first, link = replica(cache=CacheConfig(1 << 24))
    expected = run_requests(first, requests)
    sharing.drain(link)
    backend = fake_backend(**sizes)
    link = sharing.link(backend, troubled, timeout_s=60.0)
    engine = engine_over(backend, link=link, cache=CacheConfig(1 << 24))
    troubled.stalled = True
    for request in requests:
        engine.add(request)
    results: dict[str, Any] = {}
    assert not collect_step(engine, results)
    assert engine.stats()["store_fetches_in_flight"] == num_fetches
    troubled.stalled = False
    while not all(request.request_id in results and results[request.request_id].finish_reason for request in requests):
        if not collect_step(engine, results):
            engine.wait_for_work()
    engine.check_integrity()
    for request in requests:
        result = results[request.request_id]
        assert (result.num_cached_tokens, result.cache_source) == (576, "store")
        assert result.output == expected[request.request_id].output


def test_cancelling_while_fetching_frees_everything(
    replica: Build,
    published: Any,
    sharing: Any,
    troubled: TroubledStore,
    request_for: Build,
    prompt_of: Build,
    ask: Build,
) -> None:
    troubled.stalled = True
    engine, link = replica(troubled)
    engine.add(request_for(prompt_of(600), request_id="gone"))
    assert engine.step() is None
    engine.cancel("gone")
    engine.check_integrity()
    troubled.stalled = False
    sharing.drain(link)
    engine.wait_for_work()
    engine.check_integrity()
    # What arrived was verified, so it is kept for others.
    result = ask(engine)
    assert (result.num_cached_tokens, result.cache_source) == (576, "host")
    assert result.output == published.output


def test_twins_share_one_fetch(
    replica: Build, published: Any, troubled: TroubledStore, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    engine, link = replica(troubled)
    results = run_requests(engine, [request_for(prompt_of(600)) for _ in range(3)])
    assert {result.num_cached_tokens for result in results.values()} == {576}
    assert all(result.output == published.output for result in results.values())
    assert link.stats()["fetch_hits"] == 1


def test_another_namespace_shares_nothing(
    fake_backend: Build, engine_over: Build, sharing: Any, ask: Build, published: Any
) -> None:
    backend = fake_backend()
    link = sharing.link(backend, namespace=b"\1" * 32)
    result = ask(engine_over(backend, link=link, namespace=b"\1" * 32))
    assert result.num_cached_tokens == 0
    assert link.stats()["fetch_misses_absent"] == 1


def test_a_prefix_that_was_local_when_the_fetch_began_may_go_before_it_ends(
    replica: Build,
    published: Any,
    sharing: Any,
    troubled: TroubledStore,
    run_requests: Build,
    request_for: Build,
    prompt_of: Build,
    ask: Build,
    collect_step: Build,
) -> None:
    """The fetch left out the first segment because its blocks were resident; meanwhile others take those blocks."""
    engine, link = replica(troubled, cache=CacheConfig(host_bytes=2800), timeout_s=60)
    ask(engine, 300)
    troubled.stalled = True
    request = request_for(prompt_of(600))
    engine.add(request)
    assert engine.step() is None
    filler = [request_for(prompt_of(1500, seed=20 + i), max_tokens=1) for i in range(8)]
    for other in filler:
        engine.add(other)
    results: dict[str, Any] = {}
    while collect_step(engine, results):
        pass
    troubled.stalled = False
    while not (results.get(request.request_id) and results[request.request_id].finish_reason):
        if not collect_step(engine, results):
            engine.wait_for_work()
    assert link.stats()["fetch_hits"] == 1
    assert results[request.request_id].num_cached_tokens == 0
    assert results[request.request_id].output == published.output
    # It was given up on purpose, not lost.
    assert engine.stats()["host_evictions_lost_group"] == 0
    engine.check_integrity()


def test_no_step_waits_for_a_store(replica: Build, ask: Build, sharing: Any, troubled: TroubledStore) -> None:
    """The loop of the store is held up altogether, and the engine goes on."""
    engine, link = replica(troubled)
    free = threading.Event()
    sharing.loop.call_soon_threadsafe(free.wait)
    assert ask(engine).finish_reason == "length"
    free.set()
    sharing.drain(link)
    assert list(sharing.index.positions.values()) == [576]
