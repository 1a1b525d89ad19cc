"""Hit equals miss as a property: any cut, any chunk budget, any batch mates, every tier, and through a preemption.

One float32 prompt. A prefix of it up to a block boundary is known under a key chain of its own, so that a request which
goes on past that boundary starts exactly there. `tests/replicas/test_hit_equals_miss.py` shows that each comparison
fails where a part of the state is lost.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import Dropped, DropReason, Exists, Hit, Miss, Part, Ready, Stored
from warmstate.replicas.config import CacheConfig

Build = Callable[..., Any]
Tier = Literal["device", "host", "store"]

BLOCK = 64
PAST = 3 * BLOCK
BOUNDARIES = range(BLOCK, 1000, BLOCK)
NUM_OUTPUT = 3
NUM_BLOCKS = 65
HOST_BYTES = 64 << 20
NO_PARKING_BYTES = 256 << 10

REPEATABLE = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Cut:
    """The prompt up to `past` tokens beyond `boundary`, up to which it is known; boundary 0 is an unknown prompt."""

    boundary: int
    past: int

    @property
    def length(self) -> int:
        return self.boundary + self.past


class ReadOnlyStore:
    """What was seeded stays as it is, so that every example finds the same."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        return await self._inner.get(key, into)

    async def prepare(self, needed: Sequence[ObjectKey], num_bytes: int, ttl_s: int | None = None) -> Ready | Dropped:
        return Dropped(DropReason.NO_ROOM)

    async def put(
        self, key: ObjectKey, parts: Mapping[str, Part], ttl_s: int | None = None
    ) -> Stored | Exists | Dropped:
        return Dropped(DropReason.NO_ROOM)

    async def delete(self, key: ObjectKey) -> None:
        raise AssertionError("nothing here is bad")

    async def close(self) -> None:
        pass


class Bench:
    """Fresh replicas over one seeded store, and the answers that no cache had a part in."""

    def __init__(
        self,
        computed: dict[int, Any],
        new_engine: Build,
        run: Build,
        request_for: Build,
        prompt_of: Build,
        wait_for_traffic: Callable[[], None],
    ) -> None:
        self._computed = computed
        self.wait_for_traffic = wait_for_traffic
        self._new_engine = new_engine
        self._run = run
        self._request_for = request_for
        self._prompt = prompt_of(BOUNDARIES[-1] + PAST)
        self._filler = prompt_of(NUM_BLOCKS * BLOCK, seed=1)
        self._unknown = itertools.count()

    def seed(self, publisher: Any) -> None:
        """Makes every boundary known, each under its own chain."""
        self._run(publisher, [self._known_part(boundary) for boundary in BOUNDARIES])
        self._run(publisher, [self._filling(NUM_BLOCKS)])

    def computed(self, length: int) -> Any:
        if length not in self._computed:
            request = self._request_for(self._prompt[:length], max_tokens=NUM_OUTPUT)
            engine = self._new_engine(cache=CacheConfig(0, enabled=False))
            self._computed[length] = self._run(engine, [request])[request.request_id].output
        return self._computed[length]

    def replica_with(self, tier: Tier, cuts: Iterable[Cut], num_blocks: int = NUM_BLOCKS, **options: Any) -> Any:
        """A replica that holds the known parts of `cuts` in this tier and in none above."""
        engine = self._new_engine(num_blocks=num_blocks, is_linked=True, **options)
        if tier != "store":
            self._run(engine, [self._known_part(cut.boundary) for cut in cuts if cut.boundary])
        if tier == "host":
            self._run(engine, [self._filling(num_blocks)])
        return engine

    def ask(self, engine: Any, cuts: Sequence[Cut]) -> list[Any]:
        """The results of all cuts, asked at once."""
        requests = [self.request(cut) for cut in cuts]
        results = self._run(engine, requests)
        return [results[request.request_id] for request in requests]

    def request(self, cut: Cut) -> Any:
        root = self._root(cut.boundary)
        return self._request_for(self._prompt[: cut.length], max_tokens=NUM_OUTPUT, chain_root=root)

    def _known_part(self, boundary: int) -> Any:
        return self._request_for(self._prompt[: boundary + 1], max_tokens=1, chain_root=self._root(boundary))

    def _filling(self, num_blocks: int) -> Any:
        """As long as all blocks together: once it ran, nothing else is resident."""
        return self._request_for(self._filler[: (num_blocks - 1) * BLOCK - 1], max_tokens=1)

    def _root(self, boundary: int) -> bytes:
        return b"%032d" % (boundary if boundary else 1_000_000 + next(self._unknown))


def _cache(host_bytes: int) -> CacheConfig:
    """However fast a tiny model computes, what is stored is fetched."""
    return CacheConfig(host_bytes, fetch_policy="always")


@pytest.fixture(scope="module")
def computed() -> dict[int, Any]:
    """The answers by length, computed when first asked for."""
    return {}


@pytest.fixture
def bench(
    computed: dict[int, Any],
    torch_backend: Build,
    engine_over: Build,
    run_requests: Build,
    request_for: Build,
    prompt_of: Build,
    sharing: Any,
) -> Iterator[Bench]:
    def new_engine(num_blocks: int = NUM_BLOCKS, *, is_linked: bool = False, **options: Any) -> Any:
        backend = torch_backend(num_slots=8, num_blocks=num_blocks)
        link = sharing.link(backend, ReadOnlyStore(sharing.memory), timeout_s=60) if is_linked else None
        if link is not None:
            links.append(link)
        return engine_over(backend, link=link, **{"cache": _cache(HOST_BYTES), **options})

    def wait_for_traffic() -> None:
        while links:
            sharing.drain(links.pop())

    links: list[Any] = []
    made = Bench(computed, new_engine, run_requests, request_for, prompt_of, wait_for_traffic)
    backend = torch_backend(num_slots=8)
    links.append(sharing.link(backend))
    made.seed(engine_over(backend, link=links[0]))
    made.wait_for_traffic()
    yield made
    made.wait_for_traffic()


def known_cuts(pasts: st.SearchStrategy[int]) -> st.SearchStrategy[Cut]:
    return st.builds(Cut, st.sampled_from(BOUNDARIES), pasts)


MATES = st.lists(st.builds(Cut, st.just(0), st.integers(1, PAST)), max_size=2)


@given(
    known=st.lists(known_cuts(st.integers(1, PAST)), min_size=1, max_size=3, unique_by=lambda cut: cut.boundary),
    mates=MATES,
    max_batch_tokens=st.integers(BLOCK, 600),
)
@settings(REPEATABLE, max_examples=10)
def test_a_hit_in_any_tier_equals_a_miss(
    bench: Bench, known: list[Cut], mates: list[Cut], max_batch_tokens: int
) -> None:
    cuts = [*mates, *known]
    for tier in ("device", "host", "store"):
        results = bench.ask(bench.replica_with(tier, known, max_batch_tokens=max_batch_tokens), cuts)
        for cut, result in zip(cuts, results, strict=True):
            assert (result.num_cached_tokens, result.cache_source) == (cut.boundary, tier if cut.boundary else "none")
            assert result.output == bench.computed(cut.length)


# The answer to such a cut needs one block more than its prompt.
CROSSING = st.sampled_from([past - short for past in range(BLOCK, PAST + 1, BLOCK) for short in (0, 1)])


@given(
    cut=known_cuts(CROSSING),
    tier=st.sampled_from(["device", "host", "store"]),
    host_bytes=st.sampled_from([HOST_BYTES, NO_PARKING_BYTES]),
    max_batch_tokens=st.integers(BLOCK, 600),
)
@settings(REPEATABLE, max_examples=8)
def test_a_hit_that_is_preempted_equals_a_miss(
    bench: Bench,
    request_for: Build,
    prompt_of: Build,
    collect_step: Build,
    cut: Cut,
    tier: Tier,
    host_bytes: int,
    max_batch_tokens: int,
) -> None:
    """An elder and the hit fit together with one block to spare, and both come to want it."""
    num_blocks = 1 + 1 + -(-cut.length // BLOCK) + 1
    engine = bench.replica_with(tier, [cut], num_blocks, cache=_cache(host_bytes), max_batch_tokens=max_batch_tokens)
    elder, hit = request_for(prompt_of(BLOCK - 1, seed=2), max_tokens=8), bench.request(cut)
    results: dict[str, Any] = {}
    for request in (elder, hit):
        engine.add(request)
    collect_step(engine, results)
    # What it fetches has come by the second step, before the elder needs its second block.
    bench.wait_for_traffic()
    while collect_step(engine, results):
        pass
    engine.check_integrity()
    stats = engine.stats()
    assert stats["num_preemptions"] > 0
    assert (stats["restores_parked"] > 0) == (host_bytes == HOST_BYTES)
    assert results[hit.request_id].output == bench.computed(cut.length)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first_past", range(1, PAST + 1, BLOCK // 2))
@pytest.mark.parametrize("tier", ["device", "host", "store"])
def test_every_cut_past_every_boundary_equals_a_miss(bench: Bench, tier: Tier, first_past: int) -> None:
    for past in range(first_past, first_past + BLOCK // 2):
        for group in (BOUNDARIES[::3], BOUNDARIES[1::3], BOUNDARIES[2::3]):
            cuts = [Cut(boundary, past) for boundary in group]
            results = bench.ask(bench.replica_with(tier, cuts, max_batch_tokens=BLOCK + 7 * past), cuts)
            for cut, result in zip(cuts, results, strict=True):
                assert (result.num_cached_tokens, result.cache_source) == (cut.boundary, tier)
                assert result.output == bench.computed(cut.length)
