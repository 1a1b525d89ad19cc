"""What a replica keeps of what it computes: forks, ends of answers, safety positions, and no more than it may."""

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Keys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from warmstate.cache_store.keys import ObjectKey, chain_root, prefix_keys
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import Dropped, Exists, Hit, Miss, Part, Ready, Stored
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.messages import CheckpointKind, Mark
from warmstate.replicas.sequence import Sequence

Build = Callable[..., Any]

ROOMY = CacheConfig(64 << 20)


class TtlStore:
    """A memory store that remembers for how long each object was wanted."""

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner
        self.ttl_s: dict[tuple[str, int], list[int | None]] = {}
        self.renewed: list[tuple[list[int], int | None]] = []

    async def get(self, key: ObjectKey, into: Mapping[str, Part]) -> Hit | Miss:
        return await self.inner.get(key, into)

    async def prepare(self, needed: Keys[ObjectKey], num_bytes: int, ttl_s: int | None = None) -> Ready | Dropped:
        self.renewed.append(([key.position for key in needed], ttl_s))
        return await self.inner.prepare(needed, num_bytes, ttl_s)

    async def put(
        self, key: ObjectKey, parts: Mapping[str, Part], ttl_s: int | None = None
    ) -> Stored | Exists | Dropped:
        if not key.group:
            self.ttl_s.setdefault((key.kind, key.position), []).append(ttl_s)
        return await self.inner.put(key, parts, ttl_s)

    async def delete(self, key: ObjectKey) -> None:
        await self.inner.delete(key)

    async def close(self) -> None:
        await self.inner.close()


@pytest.fixture
def forks(prompt_of: Build) -> Callable[[int, int, int], Any]:
    """A prompt whose first `shared` tokens are those of every other, and whose rest is its own."""

    def build(shared: int, own: int, seed: int) -> Any:
        return np.concatenate([prompt_of(shared), prompt_of(own, seed=100 + seed)])

    return build


@pytest.fixture
def replica(fake_backend: Build, engine_over: Build) -> Callable[..., Any]:
    def build(num_blocks: int = 400, num_slots: int = 4, **options: Any) -> Any:
        backend = fake_backend(num_blocks=num_blocks, num_slots=num_slots, max_model_len=20_000)
        return engine_over(backend, **{"cache": ROOMY, **options})

    return build


@pytest.fixture
def ask(run_requests: Build, request_for: Build) -> Callable[..., Any]:
    def run(engine: Any, prompt: Any, **options: Any) -> Any:
        request = request_for(prompt, **options)
        return run_requests(engine, [request])[request.request_id]

    return run


def kept(engine: Any) -> dict[str, int]:
    """How many checkpoints were kept, by kind."""
    counts = {kind: int(engine.stats()[f"checkpoints_kept_{kind}"]) for kind in CheckpointKind}
    return {kind: count for kind, count in counts.items() if count}


def test_a_fork_is_found_when_the_second_prompt_takes_it_not_the_third(
    replica: Build, ask: Build, forks: Build
) -> None:
    engine = replica()
    cached = [ask(engine, forks(600, 300, seed)).num_cached_tokens for seed in range(4)]
    assert cached == [0, 0, 576, 576]
    assert kept(engine) == {"end": 4, "branch": 1}


def test_a_fork_below_a_usable_checkpoint_is_found_too(replica: Build, ask: Build, forks: Build) -> None:
    """The system block is usable, and beyond it the prompts have a document in common."""
    engine, marks = replica(), (Mark(CheckpointKind.SYSTEM, 200), Mark(CheckpointKind.TURN, 880))
    cached = [ask(engine, forks(700, 190, seed), marks=marks).num_cached_tokens for seed in range(3)]
    assert cached == [0, 192, 640]
    assert kept(engine) == {"system": 1, "turn": 3, "branch": 1}


def test_a_fork_is_found_where_the_first_prompt_was_cancelled(
    replica: Build, ask: Build, request_for: Build, forks: Build
) -> None:
    engine = replica(max_batch_tokens=128)
    engine.add(request_for(forks(600, 300, 0), request_id="gone"))
    engine.step()
    engine.cancel("gone")
    cached = [ask(engine, forks(600, 300, seed)).num_cached_tokens for seed in (1, 2)]
    assert cached == [0, 576]


def test_the_same_prompt_again_is_no_fork(replica: Build, ask: Build, prompt_of: Build) -> None:
    engine = replica()
    for length, usable in ((600, 576), (640, 576), (641, 640)):
        prompt = prompt_of(length, seed=length)
        assert [ask(engine, prompt, max_tokens=1).num_cached_tokens for _ in range(3)] == [0, usable, usable]
    assert "branch" not in kept(engine)


def test_an_answer_is_resumed_where_it_ended(replica: Build, ask: Build, prompt_of: Build) -> None:
    """The next turn replays prompt and answer exactly, as tool loops do."""
    engine, alone = replica(), replica(cache=CacheConfig(0, enabled=False))
    prompt, cached, positions = prompt_of(100), [], []
    for turn in range(5):
        options = {"max_tokens": 90, "marks": (len(prompt) - 4,)}
        result = ask(engine, prompt, **options)
        assert result.output == ask(alone, prompt, **options).output
        cached.append(result.num_cached_tokens)
        positions.append((len(prompt) + 89) // 64 * 64)
        prompt = np.concatenate([prompt, result.token_ids, prompt_of(30, seed=turn)])
    assert cached == [0, *positions[:-1]]


def test_blocks_that_decoding_filled_are_found_on_the_device(replica: Build, ask: Build, prompt_of: Build) -> None:
    engine, prompt = replica(), prompt_of(100)
    first = ask(engine, prompt, max_tokens=400)
    result = ask(engine, [*prompt, *first.token_ids, 1])
    assert (result.num_cached_tokens, result.cache_source) == (448, "device")


@pytest.mark.parametrize("prompt_length", [60, 100])
def test_a_cancelled_answer_is_resumed_where_it_stood(
    replica: Build, ask: Build, request_for: Build, prompt_of: Build, collect_step: Build, prompt_length: int
) -> None:
    """The ingress cancels an answer in which it finds a stop string, and a user one of which he has read enough."""
    engine, alone, prompt = replica(), replica(cache=CacheConfig(0, enabled=False)), prompt_of(prompt_length)
    engine.add(request_for(prompt, request_id="stopped", max_tokens=400))
    results: dict[str, Any] = {}
    for _ in range(150):
        collect_step(engine, results)
    engine.cancel("stopped")
    assert kept(engine) == {"output": 1} | ({"end": 1} if prompt_length > 64 else {})
    engine.check_integrity()
    following = [*prompt, *results["stopped"].token_ids, 5]
    again = ask(engine, following)
    assert again.num_cached_tokens == (prompt_length + 149) // 64 * 64
    assert again.output == ask(alone, following).output


def test_a_request_cancelled_before_its_answer_or_while_it_waits_keeps_no_output(
    replica: Build, request_for: Build, prompt_of: Build, collect_step: Build
) -> None:
    engine = replica(num_blocks=12, max_batch_tokens=128)
    engine.add(request_for(prompt_of(600), request_id="in its prompt"))
    engine.step()
    engine.cancel("in its prompt")
    assert kept(engine) == {}
    requests = [request_for(prompt_of(50 + i, seed=i), request_id=str(i), max_tokens=300) for i in range(4)]
    for request in requests:
        engine.add(request)
    results: dict[str, Any] = {}
    while not (engine.stats()["num_preemptions"] and engine.stats()["num_requests_waiting"]):
        collect_step(engine, results)
    num_running = int(engine.stats()["num_requests_running"])
    for request in requests:
        engine.cancel(request.request_id)
    assert kept(engine) == {"output": num_running}
    engine.check_integrity()


@pytest.mark.parametrize("ended", ["by a NaN", "by a client that leaves before a NaN in its state is seen"])
def test_an_answer_that_was_not_finite_is_not_kept(
    fake_backend: Build, engine_over: Build, request_for: Build, prompt_of: Build, collect_step: Build, ended: str
) -> None:
    backend = fake_backend(num_blocks=100)
    engine = engine_over(backend, cache=ROOMY)
    engine.add(request_for(prompt_of(60), request_id="bad", max_tokens=200))
    results: dict[str, Any] = {}
    for _ in range(150):
        collect_step(engine, results)
    assert engine.stats()["open_output_bytes"] > 0
    if ended == "by a NaN":
        backend.poison = lambda sequence_id: True
        collect_step(engine, results)
        assert results["bad"].finish_reason == "error"
    else:
        backend.read_kv = lambda blocks, start, stop, out: out.fill_(float("nan"))
        engine.cancel("bad")
        assert engine.stats()["kv_blocks_resident"] == 0
    assert kept(engine) == {}
    assert engine.stats()["open_output_bytes"] == 0
    engine.check_integrity()


def test_preempted_answers_are_kept_once_and_exactly(
    replica: Build, ask: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    engine, alone = replica(num_blocks=12), replica(cache=CacheConfig(0, enabled=False))
    requests = [request_for(prompt_of(50 + i, seed=i), max_tokens=150) for i in range(4)]
    results = run_requests(engine, requests)
    assert engine.stats()["num_preemptions"] > 0
    assert kept(engine) == {"output": 4}
    for request in requests:
        answer = results[request.request_id]
        following = [*request.token_ids, *answer.token_ids, 5]
        again = ask(engine, following)
        assert again.num_cached_tokens == (len(request.token_ids) + 149) // 64 * 64
        assert again.output == ask(alone, following).output


def test_parked_sequences_come_before_open_answers(
    replica: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    """The area holds one parked sequence or the ends of a few answers."""
    engine = replica(num_blocks=8, cache=CacheConfig(4 * 6500))
    run_requests(engine, [request_for(prompt_of(60, seed=i), max_tokens=200) for i in range(3)])
    stats = engine.stats()
    assert stats["restores_parked"] > 0
    assert stats["parked_bytes"] == stats["open_output_bytes"] == 0


def test_a_long_prompt_can_be_resumed_early_on(replica: Build, ask: Build, forks: Build) -> None:
    """Two prompts part within a block: what is usable is the last power of two before."""
    engine = replica(max_batch_tokens=640)
    ask(engine, forks(3000, 100, 0))
    assert kept(engine) == {"safety": 2, "end": 1}
    result = ask(engine, forks(2500, 800, 1))
    assert result.num_cached_tokens == 2048


def test_safety_positions_are_published_when_a_second_prompt_passes_them(
    replica: Build, ask: Build, forks: Build, fake_backend: Build, engine_over: Build, sharing: Any
) -> None:
    backend = fake_backend(num_blocks=200, max_model_len=20_000)
    link = sharing.link(backend)
    engine = engine_over(backend, cache=ROOMY, link=link)
    for seed, published in ((0, [3072]), (1, [1024, 2048, 3008, 3072, 3072])):
        ask(engine, forks(3050, 50, seed))
        sharing.drain(link)
        assert sorted(sharing.index.positions.values()) == published


def test_a_safety_position_seen_before_is_published_when_it_is_computed_again(
    ask: Build, forks: Build, fake_backend: Build, engine_over: Build, sharing: Any
) -> None:
    backend = fake_backend(num_blocks=200, max_model_len=20_000)
    link = sharing.link(backend)
    # Nothing can be kept here, only published.
    engine = engine_over(backend, cache=CacheConfig(64), link=link)
    for seed, published in ((0, [1152]), (1, [1024, 1088, 1152, 1152])):
        ask(engine, forks(1100, 70, seed))
        sharing.drain(link)
        assert sorted(sharing.index.positions.values()) == published


def test_the_end_of_an_answer_is_wanted_for_a_session_and_all_else_for_longer(
    ask: Build, prompt_of: Build, fake_backend: Build, engine_over: Build, sharing: Any
) -> None:
    backend, store = fake_backend(num_blocks=100), TtlStore(sharing.memory)
    link = sharing.link(backend, store)
    engine = engine_over(backend, cache=CacheConfig(64 << 20, session_ttl_s=77), link=link)
    prompt = prompt_of(300)
    answer = ask(engine, prompt, max_tokens=260)
    sharing.drain(link)
    assert store.ttl_s == {("kv", 256): [None], ("ck", 256): [None], ("kv", 512): [77], ("ck", 512): [77]}
    # What the next turn needs for longer lives longer from now on, though it is there.
    ask(engine, [*prompt, *answer.token_ids, *prompt_of(50)])
    sharing.drain(link)
    assert store.renewed == [([], None), ([256], 77), ([256, 512], None)]
    assert store.ttl_s[("ck", 576)] == [None]


def test_a_growing_conversation_keeps_its_tail_and_no_more_than_its_path_may(
    replica: Build, ask: Build, prompt_of: Build
) -> None:
    engine = replica(cache=CacheConfig(64 << 20, max_checkpoints_per_path=5))
    prompt, cached, ends = prompt_of(150), [], []
    for turn in range(14):
        marks = (Mark(CheckpointKind.SYSTEM, 100), Mark(CheckpointKind.TURN, len(prompt) - 3))
        answer = ask(engine, prompt, marks=marks, max_tokens=80)
        cached.append(answer.num_cached_tokens)
        ends.append((len(prompt) + 79) // 64 * 64)
        assert engine.stats()["host_checkpoints"] <= 5
        prompt = np.concatenate([prompt, answer.token_ids, prompt_of(70 + 9 * turn, seed=turn)])
    assert cached == [0, *ends[:-1]]
    assert engine.stats()["host_evictions_path_cap"] > 10
    # The system block of the first turn serves another conversation still.
    other = np.concatenate([prompt[:110], prompt_of(300, seed=99)])
    assert ask(engine, other).num_cached_tokens == 64


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_does_not_depend_on_chunks_slots_or_company(
    replica: Build, run_requests: Build, request_for: Build, prompt_of: Build, seed: int
) -> None:
    """Zero of a million tokens were hits elsewhere, because load cut the chunks so that no step ended on the grid."""
    rng = random.Random(seed)
    prompts = [
        np.concatenate(
            [prompt_of(rng.choice([0, 300, 1100]), seed=rng.randrange(2)), prompt_of(rng.randrange(1, 400), i)]
        )
        for i in range(7)
    ]
    marks = [tuple(rng.sample(range(len(prompt)), min(len(prompt), rng.randrange(3)))) for prompt in prompts]

    def keep(together: bool, **options: Any) -> set[bytes]:
        keys: set[bytes] = set()
        engine = replica(listener=lambda key, position, usable: keys.add(key), **options)
        requests = [request_for(p, marks=m, max_tokens=40) for p, m in zip(prompts, marks, strict=True)]
        for batch in [requests] if together else [[request] for request in requests]:
            run_requests(engine, batch)
        return keys

    expected = keep(together=False, max_batch_tokens=4096)
    for _ in range(2):
        options = {"max_batch_tokens": rng.randrange(64, 700), "num_slots": rng.randrange(1, 5)}
        assert keep(together=True, **options) == expected


def test_a_backend_that_pays_for_splits_is_asked_for_two_and_for_the_end_of_the_answer(
    fake_backend: Build, engine_over: Build, ask: Build, prompt_of: Build
) -> None:
    class Costly(fake_backend):  # type: ignore[misc, valid-type]
        """Remembers at which positions of each row it was asked for states."""

        limits = property(lambda self: replace(self._limits, max_prefill_splits=2))

        def __init__(self, **sizes: Any) -> None:
            super().__init__(**sizes)
            self.asked: list[tuple[int, tuple[int, ...]]] = []

        def forward(self, plan: Any, tokens: Any) -> Any:
            self.asked += [(row.count, row.checkpoint_after) for row in plan.rows if row.checkpoint_after]
            return super().forward(plan, tokens)

    backend = Costly(num_blocks=100, max_model_len=6000)
    marks = (Mark(CheckpointKind.SYSTEM, 300), Mark(CheckpointKind.HINT, 900), Mark(CheckpointKind.TURN, 2500))
    answer = ask(engine_over(backend, cache=ROOMY, max_batch_tokens=4096), prompt_of(2562), marks=marks, max_tokens=70)
    assert len(answer.token_ids) == 70
    assert backend.asked == [(2562, (256, 2496)), (1, (2624,))]


def test_the_keys_of_an_answer_are_those_of_a_prompt_that_replays_it(request_for: Build, prompt_of: Build) -> None:
    for length in (1, 63, 64, 100, 128):
        sequence = Sequence(request_for(prompt_of(length), max_tokens=200), 0, 4096)
        tokens = [*prompt_of(length)]
        for token in range(150):
            sequence.put_token(token % 97)
            tokens.append(token % 97)
            assert sequence.prefix_keys == prefix_keys(np.array(tokens, dtype=np.uint32), chain_root())


def test_a_prompt_that_came_without_its_keys_shares_nothing(request_for: Build, prompt_of: Build) -> None:
    request = replace(request_for(prompt_of(100), max_tokens=100), prompt_keys=b"")
    sequence = Sequence(request, 0, 4096)
    for token in range(90):
        sequence.put_token(token)
    assert sequence.prefix_keys == []


def test_who_takes_a_fork_after_its_first_taker_waits_for_it(
    replica: Build, ask: Build, run_requests: Build, request_for: Build, forks: Build
) -> None:
    engine, alone = replica(max_batch_tokens=1024), replica(cache=CacheConfig(0, enabled=False))
    ask(engine, forks(600, 300, 0))
    requests = [request_for(forks(600, 300, seed)) for seed in (1, 2, 3)]
    results = run_requests(engine, requests)
    assert [results[request.request_id].num_cached_tokens for request in requests] == [0, 576, 576]
    assert engine.stats()["twin_waits"] == 2
    for request in requests:
        assert results[request.request_id].output == ask(alone, request.token_ids).output


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_who_waits_for_a_fork_whose_taker_is_cancelled_takes_it_itself(
    replica: Build, ask: Build, request_for: Build, forks: Build, collect_step: Build, steps: int
) -> None:
    engine, alone = replica(max_batch_tokens=128), replica(cache=CacheConfig(0, enabled=False))
    ask(engine, forks(600, 300, 0))
    leader, follower = (request_for(forks(600, 300, seed)) for seed in (1, 2))
    results: dict[str, Any] = {}
    for request in (leader, follower):
        engine.add(request)
    for _ in range(steps):
        collect_step(engine, results)
    engine.cancel(leader.request_id)
    while collect_step(engine, results):
        pass
    engine.check_integrity()
    assert results[follower.request_id].num_cached_tokens == 0
    assert results[follower.request_id].output == ask(alone, follower.token_ids).output
    assert kept(engine)["branch"] == 1
