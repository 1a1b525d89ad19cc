"""What users of other servers reported of prefixes that came from, or went to, another tier or process.

`tests/reported_failures.md` lists the reports and the test of each; here are those that no other test answers.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import Dropped, Exists, Hit, Miss, MissReason, Part, Stored
from warmstate.replicas.config import CacheConfig

Build = Callable[..., Any]

ALWAYS = CacheConfig(host_bytes=1 << 22, fetch_policy="always")


class SlowStore(MemoryStore):
    """Accepts nothing while `is_slow`; `lost` objects are known but not there."""

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.is_slow = False
        self.lost: Callable[[ObjectKey], bool] = lambda key: False
        self.gets: list[ObjectKey] = []

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        self.gets.append(key)
        return Miss(MissReason.ABSENT) if self.lost(key) else await super().get(key, into)

    async def put(
        self, key: ObjectKey, parts: Mapping[str, Part], ttl_s: int | None = None
    ) -> Stored | Exists | Dropped:
        while self.is_slow:
            await asyncio.sleep(0.005)
        return await super().put(key, parts, ttl_s)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
def ask(run_requests: Build, request_for: Build) -> Callable[..., Any]:
    def run(engine: Any, prompt: Any, **options: Any) -> Any:
        request = request_for(prompt, **options)
        return run_requests(engine, [request])[request.request_id]

    return run


@pytest.fixture
def replica(
    fake_backend: Build, engine_over: Build, sharing: Any, store: SlowStore
) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """A new replica and its link to the store."""
    links: list[Any] = []

    def build(num_blocks: int = 64, backend: Any = None) -> tuple[Any, Any]:
        backend = backend or fake_backend(num_blocks=num_blocks)
        links.append(sharing.link(backend, store))
        return engine_over(backend, link=links[-1], cache=ALWAYS), links[-1]

    yield build
    for link in links:
        sharing.drain(link)


def test_a_late_publication_holds_its_own_bytes_though_its_blocks_were_reused(
    replica: Build, ask: Build, prompt_of: Build, sharing: Any, store: SlowStore
) -> None:
    """The asynchronous write read blocks that were another request's by then (vllm #52470)."""
    first, link = replica(num_blocks=12)
    store.is_slow = True
    expected = ask(first, prompt_of(600))
    for seed in range(1, 5):
        ask(first, prompt_of(650, seed=seed), max_tokens=1)
    store.is_slow = False
    sharing.drain(link)
    other, _ = replica()
    result = ask(other, prompt_of(600))
    assert (result.num_cached_tokens, result.cache_source) == (576, "store")
    assert result.output == expected.output


def test_nothing_of_an_aborted_request_reaches_another_replica(
    replica: Build, ask: Build, request_for: Build, prompt_of: Build, sharing: Any, store: SlowStore
) -> None:
    """A retry hit a state that was announced and never written (vllm #56525)."""
    first, link = replica()
    first.add(request_for(prompt_of(3000), request_id="aborted"))
    first.step()
    first.cancel("aborted")
    sharing.drain(link)
    assert sharing.index.positions == {}
    other, _ = replica()
    assert ask(other, prompt_of(3000)).num_cached_tokens == 0


@pytest.mark.parametrize("num_local", [300, 520, 900])
def test_a_prefix_that_is_partly_local_and_partly_fetched_equals_a_miss(
    replica: Build, torch_backend: Build, ask: Build, prompt_of: Build, sharing: Any, num_local: int
) -> None:
    """36,864 local and 9,216 external tokens gave another answer (LMCache #4247); about 40 % were garbled (LMCache
    PR 2863)."""
    prompt = prompt_of(1000)
    first, link = replica(backend=torch_backend())
    expected = ask(first, prompt)
    sharing.drain(link)
    other, _ = replica(backend=torch_backend())
    ask(other, prompt[:num_local])
    result = ask(other, prompt)
    assert (result.num_cached_tokens, result.cache_source) == (960, "store")
    assert result.output == expected.output


@pytest.mark.parametrize("missing", [("ck", 960, 0), ("ck", 960, 1), ("kv", 256, 0), ("kv", 512, 0), ("kv", 768, 0)])
def test_one_missing_page_of_many_is_no_hit(
    replica: Build, ask: Build, prompt_of: Build, sharing: Any, store: SlowStore, missing: tuple[str, int, int]
) -> None:
    """1 of N pages was stored, and restores succeeded with a high hit rate and wrong answers (LMCache #4701); the
    groups of a hybrid model diverged (vllm #46453)."""
    first, link = replica()
    expected = ask(first, prompt_of(1000))
    sharing.drain(link)
    store.lost = lambda key: (key.kind, key.position, key.group) == missing
    other, _ = replica()
    result = ask(other, prompt_of(1000))
    assert (result.num_cached_tokens, result.cache_source) == (0, "none")
    assert result.output == expected.output


def test_a_failed_load_is_tried_once_and_ends_nobody(
    replica: Build, run_requests: Build, request_for: Build, prompt_of: Build, sharing: Any, store: SlowStore
) -> None:
    """One failed load ended the engine (vllm #47812, #50687), or was looked up and loaded for ever (vllm #55297)."""
    first, link = replica()
    expected = run_requests(first, [request_for(prompt_of(600), request_id="x")])["x"]
    sharing.drain(link)
    store.lost = lambda key: True
    # Whatever is told, the index goes on to claim it.
    sharing.index.remove = lambda key, position: None
    other, _ = replica()
    requests = [request_for(prompt_of(600)), request_for(prompt_of(600)), request_for(prompt_of(90, seed=3))]
    store.gets.clear()
    results = run_requests(other, requests)
    assert {result.finish_reason for result in results.values()} == {"length"}
    assert all(results[request.request_id].output == expected.output for request in requests[:2])
    read = [key for key in store.gets if key.position == 576]
    assert 0 < len(read) <= 2 * len(requests)


def test_another_salt_is_another_prefix(replica: Build, ask: Build, prompt_of: Build, sharing: Any) -> None:
    """A salt that was computed and never applied (LMCache #4183, #4783): tenants read each other's prefixes."""
    first, link = replica()
    mine = ask(first, prompt_of(300), chain_root=b"m" * 32)
    sharing.drain(link)
    other, _ = replica()
    yours, again = (ask(other, prompt_of(300), chain_root=root * 32) for root in (b"y", b"m"))
    assert (yours.num_cached_tokens, again.num_cached_tokens) == (0, 256)
    assert mine.output == yours.output == again.output
