"""On a real float32 model a restored prefix gives the same bits as a computed one, whatever tier it came from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import Dropped, Exists, Hit, Miss, Part, Ready, Stored
from warmstate.models.backend import SequenceState
from warmstate.replicas.config import CacheConfig

Build = Callable[..., Any]

LENGTHS = [1, 63, 64, 65, 66, 127, 128, 129, 192, 200, 256, 257, 320, 513]


def usable(length: int) -> int:
    """The deepest boundary that leaves a token to compute."""
    return max(length - 1, 0) // 64 * 64


@pytest.fixture(scope="module")
def ask(engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build) -> Callable[..., Any]:
    """Asks for one prompt per length, unlike any other's; returns the result."""

    def run(engine: Any, length: int, **options: Any) -> Any:
        request = request_for(prompt_of(length, seed=length), **{"max_tokens": 2, "logprobs": 5, **options})
        return run_requests(engine, [request])[request.request_id]

    return run


@pytest.fixture(scope="module")
def computed(engine_over: Build, torch_backend: Build, ask: Callable[..., Any]) -> dict[int, Any]:
    """The results without any cache."""
    engine = engine_over(torch_backend(), cache=CacheConfig(0, enabled=False))
    return {length: ask(engine, length) for length in [*LENGTHS, 500, 1000]}


def test_a_device_hit_equals_a_miss(
    engine_over: Build, torch_backend: Build, ask: Callable[..., Any], computed: dict[int, Any]
) -> None:
    engine = engine_over(torch_backend())
    for length in [*LENGTHS, 1000]:
        first, second = ask(engine, length), ask(engine, length)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, usable(length))
        assert second.cache_source == ("device" if usable(length) else "none")
        assert first.output == second.output == computed[length].output


def test_a_host_hit_equals_a_miss(
    engine_over: Build, torch_backend: Build, ask: Callable[..., Any], computed: dict[int, Any]
) -> None:
    engine = engine_over(torch_backend(num_blocks=19))
    for length in LENGTHS:
        ask(engine, length)
    # Too long to leave any block of the others resident.
    ask(engine, 1100)
    for length in reversed(LENGTHS):
        result = ask(engine, length)
        assert (result.num_cached_tokens, result.cache_source) == (usable(length), "host" if usable(length) else "none")
        assert result.output == computed[length].output


def test_a_store_hit_on_another_replica_equals_a_miss(
    engine_over: Build, torch_backend: Build, ask: Callable[..., Any], computed: dict[int, Any], sharing: Any
) -> None:
    backend = torch_backend()
    link = sharing.link(backend)
    engine = engine_over(backend, link=link)
    for length in [*LENGTHS, 1000]:
        ask(engine, length)
    sharing.drain(link)
    other = torch_backend()
    cold = engine_over(other, link=sharing.link(other))
    for length in [*LENGTHS, 1000]:
        result = ask(cold, length)
        assert (result.num_cached_tokens, result.cache_source) == (
            usable(length),
            "store" if usable(length) else "none",
        )
        assert result.output == computed[length].output


@pytest.mark.parametrize("tier", ["device", "host", "store"])
def test_a_hit_at_the_end_of_an_answer_equals_a_miss(
    engine_over: Build,
    torch_backend: Build,
    run_requests: Build,
    request_for: Build,
    prompt_of: Build,
    sharing: Any,
    tier: str,
) -> None:
    """State and KV that decoding made are those of a prefill, to the last bit."""
    backend = torch_backend(num_blocks=25)
    link = sharing.link(backend)
    warm = engine_over(backend, link=link)
    asked = [request_for(prompt_of(50 + 47 * i, seed=i), max_tokens=18 + 41 * i) for i in range(4)]
    answers = run_requests(warm, asked)
    sharing.drain(link)
    if tier == "host":
        run_requests(warm, [request_for(prompt_of(24 * 64 - 1, seed=9), max_tokens=1)])
    elif tier == "store":
        other = torch_backend()
        warm = engine_over(other, link=sharing.link(other))
    cold = engine_over(torch_backend(), cache=CacheConfig(0, enabled=False))
    for request in asked:
        said = [*request.token_ids, *answers[request.request_id].token_ids, 7, 7]
        following = request_for(said, max_tokens=3, logprobs=5)
        hit, miss = (run_requests(engine, [following])[following.request_id] for engine in (warm, cold))
        assert (hit.num_cached_tokens, hit.cache_source) == ((len(said) - 3) // 64 * 64, tier)
        assert hit.output == miss.output


def test_a_hit_in_the_middle_of_a_path_equals_a_miss(
    engine_over: Build, torch_backend: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    """Turns of one chat: each prompt begins with the one before, cut short of its generation prompt."""
    warm, cold = engine_over(torch_backend()), engine_over(torch_backend(), cache=CacheConfig(0, enabled=False))
    cached: list[int] = []
    for length in (150, 290, 300, 700):
        prompt = prompt_of(length, seed=5)
        results = []
        for engine in (warm, cold):
            request = request_for(prompt, marks=(100, length - 4))
            results.append(run_requests(engine, [request])[request.request_id])
        assert results[0].output == results[1].output
        cached.append(results[0].num_cached_tokens)
    assert cached == [0, 128, 256, 256]


def test_chunking_and_decode_companions_change_no_bit(
    engine_over: Build, torch_backend: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    requests = [
        request_for(
            prompt_of(3 + 29 * i, seed=i % 4), max_tokens=4 + i % 5, temperature=(i % 3) * 0.5, seed=i, logprobs=3
        )
        for i in range(16)
    ]
    backend = torch_backend(num_slots=16)
    together = run_requests(engine_over(backend, max_batch_tokens=256), requests)
    alone = engine_over(torch_backend(), cache=CacheConfig(0, enabled=False))
    for request in requests:
        assert together[request.request_id].output == run_requests(alone, [request])[request.request_id].output


@pytest.mark.parametrize("host_bytes", [16 << 20, 0], ids=["parked", "recomputed"])
def test_preemption_changes_no_bit(
    engine_over: Build, torch_backend: Build, run_requests: Build, request_for: Build, prompt_of: Build, host_bytes: int
) -> None:
    requests = [request_for(prompt_of(110 + i, seed=i), max_tokens=24, temperature=0.8, seed=i) for i in range(2)]
    engine = engine_over(torch_backend(num_blocks=6), cache=CacheConfig(host_bytes))
    tight = run_requests(engine, requests)
    assert engine.stats()["num_preemptions"] > 0
    roomy = run_requests(engine_over(torch_backend(), cache=CacheConfig(0, enabled=False)), requests)
    for request in requests:
        assert tight[request.request_id].output == roomy[request.request_id].output


class ForgetfulStore:
    """A store that gives one part back as zeros, as one would that checks nothing."""

    def __init__(self, inner: MemoryStore, part: str) -> None:
        self._inner = inner
        self._part = part

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        outcome = await self._inner.get(key, into)
        if self._part in into:
            into[self._part].data[:] = bytes(into[self._part].spec.num_bytes)
        return outcome

    async def prepare(self, needed: Sequence[ObjectKey], num_bytes: int, ttl_s: int | None = None) -> Ready | Dropped:
        return await self._inner.prepare(needed, num_bytes, ttl_s)

    async def put(
        self, key: ObjectKey, parts: Mapping[str, Part], ttl_s: int | None = None
    ) -> Stored | Exists | Dropped:
        return await self._inner.put(key, parts, ttl_s)

    async def delete(self, key: ObjectKey) -> None:
        await self._inner.delete(key)

    async def close(self) -> None:
        await self._inner.close()


@pytest.mark.parametrize("part", ["rec", "conv", "kv_tail", "kv"])
def test_the_comparison_fails_when_a_part_of_the_state_is_lost(
    engine_over: Build, torch_backend: Build, ask: Callable[..., Any], computed: dict[int, Any], sharing: Any, part: str
) -> None:
    backend = torch_backend()
    link = sharing.link(backend)
    # The deepest checkpoint is at 448, right before the last tokens.
    ask(engine_over(backend, link=link), 500, marks=(450,))
    sharing.drain(link)
    other = torch_backend()
    result = ask(engine_over(other, link=sharing.link(other, ForgetfulStore(sharing.memory, part))), 500, marks=(450,))
    assert result.num_cached_tokens == 448
    assert result.output != computed[500].output


def test_a_poisoned_slot_never_reaches_a_new_sequence(
    engine_over: Build, torch_backend: Build, ask: Callable[..., Any], computed: dict[int, Any]
) -> None:
    backend = torch_backend(num_slots=1)
    engine = engine_over(backend)
    nan = torch.full(backend.shapes.rec_shape(), torch.nan), torch.full(backend.shapes.conv_shape(), torch.nan)
    for length in (65, 65, 200, 200):
        backend.write_state(0, SequenceState(64, *nan))
        assert ask(engine, length).output == computed[length].output
