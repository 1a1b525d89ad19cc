"""KV copied beside the steps: until it is there nobody starts from it, its blocks stay, and nothing is lost or left."""

import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmstate.cache_store.keys import BLOCK_TOKENS
from warmstate.replicas.cache.copying import CopyThread, Post, Work
from warmstate.replicas.config import CacheConfig

Build = Callable[..., Any]


class CopyWhenTold:
    """A `Copier` whose thread is the test."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Work, Work, Post]] = []

    def run(self, work: Work, done: Work, post: Post) -> None:
        self.jobs.append((work, done, post))

    def copy_one(self) -> None:
        work, done, post = self.jobs.pop(0)
        work()
        post(done)

    def copy_all(self) -> None:
        while self.jobs:
            self.copy_one()


class Bench:
    """An engine whose copies the test makes, and what came out of it."""

    def __init__(self, engine: Any, copier: CopyWhenTold, collect_step: Build) -> None:
        self.engine = engine
        self.copier = copier
        self.results: dict[str, Any] = {}
        self._collect = collect_step

    def step(self) -> bool:
        return bool(self._collect(self.engine, self.results))

    def run(self, request: Any) -> Any:
        """Runs one request to its end without copying anything."""
        self.engine.add(request)
        while self.step():
            pass
        return self.results.get(request.request_id)


@pytest.fixture
def bench(fake_backend: Build, engine_over: Build, collect_step: Build) -> Callable[..., Bench]:
    def build(backend: Any = None, **options: Any) -> Bench:
        copier = CopyWhenTold()
        return Bench(engine_over(backend or fake_backend(), copier=copier, **options), copier, collect_step)

    return build


def bad_kv(fake_backend: Any) -> Any:
    """A backend whose KV holds a NaN for whoever reads it, and whose logits do not show it."""

    class BadKv(fake_backend):  # type: ignore[misc]
        def read_kv(self, blocks: Any, start: int, stop: int, out: torch.Tensor) -> None:
            super().read_kv(blocks, start, stop, out)
            out.view(-1)[-1] = math.nan

    return BadKv()


def test_nobody_starts_from_a_checkpoint_before_its_kv_is_there(
    bench: Callable[..., Bench], request_for: Build, prompt_of: Build
) -> None:
    subject = bench()
    first = subject.run(request_for(prompt_of(300)))
    assert first.finish_reason == "length"
    assert subject.engine.stats()["checkpoints_in_copy"] == len(subject.copier.jobs) > 0
    assert subject.engine.stats()["host_checkpoints_whole"] == 0
    waiting = request_for(prompt_of(300))
    assert subject.run(waiting) is None, "it started from half a checkpoint, or computed what was on its way"
    subject.copier.copy_all()
    second = subject.run(request_for(prompt_of(300)))
    assert subject.results[waiting.request_id].num_cached_tokens == second.num_cached_tokens == 256
    assert first.output == subject.results[waiting.request_id].output == second.output
    subject.copier.copy_all()
    subject.engine.run_posted()
    subject.engine.check_integrity()


def test_blocks_keep_their_contents_until_they_are_copied(
    bench: Callable[..., Bench], fake_backend: Build, request_for: Build, prompt_of: Build
) -> None:
    subject = bench(fake_backend(num_blocks=14))
    first = subject.run(request_for(prompt_of(600), max_tokens=1))
    # It needs more blocks than are free, and waits for the copies; then it takes those of the first.
    other = request_for(prompt_of(600, 1), max_tokens=1)
    assert subject.run(other) is None
    subject.copier.copy_all()
    while subject.step() or subject.copier.jobs:
        subject.copier.copy_all()
    assert subject.results[other.request_id].finish_reason == "length"
    again = request_for(prompt_of(600), max_tokens=1)
    subject.run(again)
    assert subject.results[again.request_id].cache_source == "host"
    assert subject.results[again.request_id].output == first.output
    subject.copier.copy_all()
    subject.engine.run_posted()
    subject.engine.check_integrity()


def test_kv_that_is_not_finite_ends_its_sequence_and_is_found_by_nobody(
    bench: Callable[..., Bench], fake_backend: Build, request_for: Build, prompt_of: Build
) -> None:
    subject = bench(bad_kv(fake_backend))
    request = request_for(prompt_of(300), max_tokens=200)
    subject.engine.add(request)
    subject.step()
    subject.copier.copy_one()
    while subject.step():
        subject.copier.copy_all()
    result = subject.results[request.request_id]
    assert result.finish_reason == "error"
    assert "NaN" in result.error
    assert subject.engine.stats()["host_checkpoints"] == 0
    assert subject.engine.stats()["kv_blocks_resident"] == 0
    subject.engine.check_integrity()


def test_kv_of_an_ended_sequence_that_is_not_finite_is_found_by_nobody(
    bench: Callable[..., Bench], fake_backend: Build, request_for: Build, prompt_of: Build
) -> None:
    subject = bench(bad_kv(fake_backend))
    assert subject.run(request_for(prompt_of(300), max_tokens=1)).finish_reason == "length"
    assert subject.engine.stats()["kv_blocks_resident"] == 4
    subject.copier.copy_all()
    subject.engine.run_posted()
    assert subject.engine.stats()["kv_blocks_resident"] == 0
    assert subject.engine.stats()["host_checkpoints"] == 0
    subject.engine.check_integrity()


def test_twins_make_one_copy_between_them(bench: Callable[..., Bench], request_for: Build, prompt_of: Build) -> None:
    """Told apart from the start, both compute the prefix; what one of them is copying the other does not."""
    subject = bench()
    for _ in range(2):
        subject.engine.add(request_for(prompt_of(300), max_tokens=1))
    while subject.step():
        pass
    assert len(subject.copier.jobs) == 1
    subject.copier.copy_all()
    while subject.step():
        subject.copier.copy_all()
    assert subject.engine.stats()["host_checkpoints"] == 1
    subject.engine.check_integrity()


def test_a_cancelled_request_leaves_nothing_behind(
    bench: Callable[..., Bench], request_for: Build, prompt_of: Build
) -> None:
    subject = bench()
    request = request_for(prompt_of(600), max_tokens=50)
    subject.engine.add(request)
    subject.step()
    subject.step()
    subject.engine.cancel(request.request_id)
    subject.copier.copy_all()
    subject.engine.run_posted()
    subject.engine.check_integrity()


def test_a_copy_that_fails_is_not_kept_and_the_next_one_is(
    fake_backend: Build, engine_over: Build, request_for: Build, prompt_of: Build, collect_step: Build
) -> None:
    class BrokenOnce(fake_backend):  # type: ignore[misc, valid-type]
        breaks = True

        def read_kv(self, *args: Any) -> None:
            if self.breaks:
                self.breaks = False
                raise RuntimeError("the device said no")
            super().read_kv(*args)

    copies = CopyThread()
    engine = engine_over(BrokenOnce(), copier=copies)
    results: dict[str, Any] = {}
    for name in ("first", "second"):
        engine.add(request_for(prompt_of(300), max_tokens=1, request_id=name))
        while collect_step(engine, results):
            pass
        copied = threading.Event()
        copies.run(lambda: None, copied.set, lambda done: done())
        assert copied.wait(10)
        engine.run_posted()
    copies.close()
    assert results["first"].output == results["second"].output
    assert results["second"].num_cached_tokens == 0
    assert engine.stats()["host_checkpoints_whole"] == 1
    engine.check_integrity()


def test_a_copy_is_made_on_another_thread_and_ends_on_the_one_it_is_posted_to() -> None:
    copies, did = CopyThread(), list[str]()
    posted: list[Work] = []
    copies.run(lambda: did.append(threading.current_thread().name), lambda: did.append("done"), posted.append)
    copies.close()
    assert did == ["warmstate-copies"]
    (done,) = posted
    done()
    assert did == ["warmstate-copies", "done"]


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_exact_however_late_the_copies_are(
    bench: Callable[..., Bench],
    fake_backend: Build,
    engine_over: Build,
    request_for: Build,
    prompt_of: Build,
    run_requests: Build,
    seed: int,
) -> None:
    """Few blocks, so that sequences are preempted while theirs are copied, and prompts that grow out of each other."""
    rng = random.Random(seed)
    subject = bench(fake_backend(num_slots=3, num_blocks=rng.choice([24, 40])), max_batch_tokens=192)
    truth = engine_over(fake_backend(), cache=CacheConfig(0, enabled=False))
    asked: list[Any] = []
    for _ in range(40):
        length = rng.choice([70, 200, 270, 520, 700])
        asked.append(
            request_for(prompt_of(length, rng.randrange(2)), max_tokens=rng.choice([1, 5, 70]), marks=[length // 2])
        )
        subject.engine.add(asked[-1])
        for _ in range(rng.randrange(4)):
            if subject.copier.jobs and rng.random() < 0.3:
                subject.copier.copy_one()
            subject.step()
    while len([r for r in subject.results.values() if r.finish_reason]) < len(asked):
        if not subject.step():
            assert subject.copier.jobs, "nothing can run, and nothing is on its way"
            subject.copier.copy_one()
    subject.copier.copy_all()
    subject.engine.run_posted()
    subject.engine.check_integrity()
    stats = subject.engine.stats()
    assert stats["restored_tokens_host"] + stats["restored_tokens_device"] > 10 * BLOCK_TOKENS
    for request in asked:
        expected = run_requests(truth, [request])[request.request_id]
        assert subject.results[request.request_id].output == expected.output
