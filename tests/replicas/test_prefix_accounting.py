"""What a running engine says of hits and blockers: each reported silence of other servers has a figure here."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from warmstate.cache_store.keys import chain_root
from warmstate.cache_store.store import Miss, MissReason, Part
from warmstate.replicas.config import CacheConfig

Build = Callable[..., Any]
ALICE, BOB = chain_root(b"alice"), chain_root(b"bob")


def figures(engine: Any, prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): n for name, n in engine.stats().items() if name.startswith(prefix) and n}


def tokens_blocked(engine: Any) -> dict[str, float]:
    return figures(engine, "cache_blocked_tokens_")


@pytest.fixture
def ask(run_requests: Build, request_for: Build) -> Callable[..., Any]:
    def run(engine: Any, prompt: Any, **options: Any) -> Any:
        request = request_for(prompt, **options)
        return run_requests(engine, [request])[request.request_id]

    return run


@pytest.fixture
def engine(fake_backend: Build, engine_over: Build) -> Any:
    return engine_over(fake_backend(num_blocks=100))


def test_results_are_told_by_source(engine: Any, ask: Build, prompt_of: Build) -> None:
    ask(engine, prompt_of(600))
    ask(engine, prompt_of(600))
    ask(engine, prompt_of(40))
    assert figures(engine, "cache_requests_") == {"miss": 1, "hit_device": 1, "too_short": 1}
    assert tokens_blocked(engine) == {"cold": 576}


def test_kv_that_outlives_every_state_is_told_as_blocked_by_the_recurrent_state(
    engine: Any, ask: Build, prompt_of: Build
) -> None:
    """The prefix is resident, and unservable: other servers show it as cached."""
    ask(engine, prompt_of(600))
    ask(engine, np.concatenate([prompt_of(520), prompt_of(100, seed=4)]))
    assert tokens_blocked(engine) == {"cold": 576 + 64, "recurrent": 512}


def test_a_prefix_shorter_than_a_block_is_counted_as_too_short(engine: Any, ask: Build, prompt_of: Build) -> None:
    """Shared prefixes of less than a block never hit; elsewhere nothing says so."""
    for _ in range(3):
        ask(engine, prompt_of(64))
    assert figures(engine, "cache_requests_") == {"too_short": 3}


def test_the_same_prompt_under_another_salt_is_told_and_answered_as_if_it_were_cold(
    engine: Any, ask: Build, prompt_of: Build
) -> None:
    """No field of an answer may tell one tenant what another has asked (CVE-2025-46570)."""
    first = ask(engine, prompt_of(600), chain_root=ALICE)
    second = ask(engine, prompt_of(600), chain_root=BOB)
    assert first == second
    assert tokens_blocked(engine) == {"cold": 576, "salt": 576}


def test_a_fetch_that_fails_is_told_by_the_object_that_failed(
    fake_backend: Build, engine_over: Build, sharing: Any, ask: Build, prompt_of: Build
) -> None:
    backend = fake_backend()
    link = sharing.link(backend)
    ask(engine_over(backend, link=link), prompt_of(600))
    sharing.drain(link)

    for miss, kind, blocker in (
        (Miss(MissReason.CORRUPT, part="conv"), "ck", "conv"),
        (Miss(MissReason.CORRUPT, part="rec"), "ck", "recurrent"),
        (Miss(MissReason.ABSENT), "kv", "kv"),
        (Miss(MissReason.UNAVAILABLE), "ck", "store"),
    ):
        rows = dict(sharing.index.positions)
        backend = fake_backend()
        refusing = Refusing(sharing.memory, kind, miss)
        engine = engine_over(backend, link=sharing.link(backend, refusing), cache=CacheConfig(host_bytes=1 << 22))
        assert ask(engine, prompt_of(600)).num_cached_tokens == 0
        assert tokens_blocked(engine) == {blocker: 576}
        sharing.index.positions.update(rows)


class Refusing:
    """A store that gives `miss` for every object of one kind, and takes no writes."""

    def __init__(self, inner: Any, kind: str, miss: Miss) -> None:
        self.inner = inner
        self.kind = kind
        self.miss = miss

    async def get(self, key: Any, into: dict[str, Part]) -> Any:
        return self.miss if key.kind == self.kind else await self.inner.get(key, into)

    async def prepare(self, needed: Any, num_bytes: int, ttl_s: int | None = None) -> Any:
        return await self.inner.prepare(needed, num_bytes, ttl_s)

    async def put(self, key: Any, parts: dict[str, Part], ttl_s: int | None = None) -> Any:
        return await self.inner.put(key, parts)

    async def delete(self, key: Any) -> None:
        await self.inner.delete(key)

    async def close(self) -> None:
        await self.inner.close()


def test_a_prefix_that_is_not_worth_fetching_is_told_as_not_fetched(
    fake_backend: Build, engine_over: Build, sharing: Any, ask: Build, prompt_of: Build
) -> None:
    backend = fake_backend()
    link = sharing.link(backend)
    ask(engine_over(backend, link=link), prompt_of(600))
    sharing.drain(link)
    backend = fake_backend()
    engine = engine_over(backend, link=sharing.link(backend), fetch_policy="never")
    ask(engine, prompt_of(600))
    assert tokens_blocked(engine) == {"not_fetched": 576}


def test_where_a_session_leaves_its_own_past_is_told(engine: Any, ask: Build, prompt_of: Build) -> None:
    """A client that changes its system text from turn to turn: the figures say where, and what it costs."""
    prompt = prompt_of(600)
    ask(engine, prompt)
    changed = prompt.copy()
    changed[100] = (changed[100] + 1) % 97
    ask(engine, changed)
    stats = engine.stats()
    assert stats["prompt_divergence_position_tokens_sum"] == 64
    assert stats["prompt_divergence_lost_tokens_sum"] == 512
    assert stats["prompt_divergence_lost_tokens_count"] == 1


def test_restores_are_timed(engine: Any, ask: Build, prompt_of: Build) -> None:
    ask(engine, prompt_of(600))
    assert engine.stats()["cache_restore_seconds_count"] == engine.stats()["cache_load_seconds_count"] == 0
    ask(engine, prompt_of(600))
    assert engine.stats()["cache_restore_seconds_count"] == engine.stats()["cache_load_seconds_count"] == 1
