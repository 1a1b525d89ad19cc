"""Replicas over small pools and a troublesome store: whatever comes, goes, fails or moves, every answer is exact."""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import Dropped, DropReason, Exists, Hit, Miss, MissReason, Part, Stored
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.messages import GenerateRequest

Build = Callable[..., Any]


class RandomStore(MemoryStore):
    """Small enough to evict; late, absent or full at random."""

    def __init__(self, budget_bytes: int, rng: random.Random) -> None:
        super().__init__(budget_bytes)
        self._rng = rng

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        await asyncio.sleep(self._rng.choice([0, 0, 0.001, 0.004]))
        if self._rng.random() < 0.1:
            return Miss(self._rng.choice([MissReason.ABSENT, MissReason.TIMEOUT, MissReason.CORRUPT]))
        return await super().get(key, into)

    async def put(
        self, key: ObjectKey, parts: Mapping[str, Part], ttl_s: int | None = None
    ) -> Stored | Exists | Dropped:
        await asyncio.sleep(self._rng.choice([0, 0.001]))
        if self._rng.random() < 0.1:
            return Dropped(DropReason.TIMEOUT)
        return await super().put(key, parts, ttl_s)


class Fleet:
    """Three replicas, and what each request has said so far, wherever it ran."""

    def __init__(self, engines: list[Any], collect: Build) -> None:
        self.engines = engines
        self._collect = collect
        self.asked: dict[str, GenerateRequest] = {}
        self.said: dict[str, list[int]] = {}
        self.at: dict[str, tuple[Any, str]] = {}
        self._results: dict[str, Any] = {}

    def ask(self, engine: Any, request: GenerateRequest) -> None:
        engine.check(request)
        engine.add(request)
        self.asked[request.request_id], self.said[request.request_id] = request, []
        self.at[request.request_id] = engine, request.request_id

    def step(self) -> bool:
        ran = [self._collect(engine, self._results) for engine in self.engines]
        for name, (_, local) in list(self.at.items()):
            result = self._results.get(local)
            if result is not None and result.finish_reason is not None:
                assert result.finish_reason == "length", result.error
                self._leave(name)
        for engine in self.engines:
            engine.check_integrity()
        return any(ran)

    def cancel(self, name: str) -> None:
        self._leave(name)
        del self.asked[name], self.said[name]

    def move(self, name: str, engine: Any, request_for: Build) -> None:
        """Goes on at another replica, as after the death of the first."""
        request = self.asked[name]
        self._leave(name)
        said, limit = self.said[name], request.sampling.max_tokens
        if len(said) == limit:
            return
        rest = request_for(
            [*request.token_ids, *said],
            max_tokens=limit - len(said),
            num_output_tokens=len(said),
            marks=request.marks,
            **_SAMPLING,
        )
        engine.add(rest)
        self.at[name] = engine, rest.request_id

    def _leave(self, name: str) -> None:
        engine, local = self.at.pop(name)
        engine.cancel(local)
        self.said[name] += self._results[local].token_ids if local in self._results else []


_SAMPLING = {"temperature": 0.8, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.1}


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_is_exact(
    fake_backend: Build,
    engine_over: Build,
    request_for: Build,
    prompt_of: Build,
    collect_step: Build,
    run_requests: Build,
    sharing: Any,
    seed: int,
) -> None:
    rng = random.Random(seed)
    store = RandomStore(rng.choice([60_000, 1 << 22]), random.Random(seed))

    def replica() -> Any:
        backend = fake_backend(num_slots=3, num_blocks=rng.choice([14, 18, 30]))
        link = sharing.link(backend, store, timeout_s=0.5, max_publish_bytes=rng.choice([20_000, 1 << 22]))
        cache = CacheConfig(rng.choice([4096, 40_000, 1 << 22]))
        return engine_over(backend, link=link, cache=cache, max_batch_tokens=rng.choice([64, 192, 512]))

    fleet = Fleet([replica() for _ in range(3)], collect_step)
    for _ in range(160):
        if rng.random() < 0.3 and len(fleet.asked) < 40:
            parts = [
                prompt_of(rng.choice([0, 200, 300]), seed=rng.randrange(2)),
                prompt_of(rng.choice([0, 64, 130]), seed=rng.randrange(2)),
                prompt_of(rng.randrange(1, 100), seed=rng.randrange(3)),
            ]
            prompt = np.concatenate(parts)
            marks = tuple(rng.sample(range(len(prompt)), min(len(prompt), rng.randrange(3))))
            fleet.ask(
                rng.choice(fleet.engines),
                request_for(prompt, max_tokens=rng.randrange(1, 90), marks=marks, **_SAMPLING),
            )
        if rng.random() < 0.05 and fleet.at:
            fleet.cancel(rng.choice(sorted(fleet.at)))
        if rng.random() < 0.1 and fleet.at:
            fleet.move(rng.choice(sorted(fleet.at)), rng.choice(fleet.engines), request_for)
        fleet.step()
    while fleet.at:
        if not fleet.step():
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.001), sharing.loop).result()
    assert len(fleet.asked) > 20
    assert sum(engine.stats()["restores_store"] for engine in fleet.engines) > 0
    solo = engine_over(fake_backend(), cache=CacheConfig(0, enabled=False))
    for name, request in fleet.asked.items():
        assert fleet.said[name] == run_requests(solo, [request])[name].token_ids
