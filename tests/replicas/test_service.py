"""A whole replica: loading, answering, refusing, sharing through a real server, and losing it."""

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.replica_rows import ReplicaRows
from warmstate.models.errors import CheckpointError
from warmstate.replicas.config import CacheConfig, EngineConfig, ReplicaConfig, StoreConfig
from warmstate.replicas.errors import OutOfMemory
from warmstate.replicas.messages import Accepted, GenerateRequest, Refused, Reply, TokenDelta
from warmstate.replicas.service import ReplicaService

Build = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as running:
        yield running


@pytest.fixture
def config(demo_path: Path) -> ReplicaConfig:
    engine = EngineConfig(max_model_len=2048, max_batch_tokens=256, max_sequences=4, max_queue=8, kv_tokens=4096)
    return ReplicaConfig(demo_path, torch.float32, True, 1, engine, CacheConfig(32 << 20, fetch_policy="always"))


def with_store(config: ReplicaConfig, server: EmbeddedServer, **options: Any) -> ReplicaConfig:
    return dataclasses.replace(config, store=StoreConfig(server.url, server.password, **options))


@asynccontextmanager
async def running(config: ReplicaConfig, name: str = "r1") -> AsyncIterator[ReplicaService]:
    service = ReplicaService(config, name)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


async def ask(service: ReplicaService, request: GenerateRequest) -> list[Reply]:
    return [reply async for reply in service.generate(request)]


def deltas(replies: list[Reply]) -> list[TokenDelta]:
    assert isinstance(replies[0], Accepted), replies
    return [reply for reply in replies[1:] if isinstance(reply, TokenDelta)]


def output(replies: list[Reply]) -> Any:
    parts = deltas(replies)
    return [t for d in parts for t in d.token_ids], [p for d in parts for p in d.logprobs], parts[-1].finish_reason


def num_misses(service: ReplicaService) -> float:
    return sum(value for name, value in service.stats().items() if name.startswith("store_fetch_misses_"))


async def until(happens: Callable[[], Awaitable[bool] | bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = happens()
        if outcome if isinstance(outcome, bool) else await outcome:
            return
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


def test_a_replica_loads_answers_and_closes(config: ReplicaConfig, request_for: Build, prompt_of: Build) -> None:
    async def scenario() -> None:
        service = ReplicaService(config, "r1")
        assert service.phase.phase == "loading"
        early = await ask(service, request_for(prompt_of(5)))
        assert isinstance(early[0], Refused)
        assert early[0].status == 503
        await service.start()
        assert (service.phase.phase, service.phase.fraction) == ("ready", 1.0)
        assert len(service.namespace) == 32
        replies = await ask(service, request_for(prompt_of(100), max_tokens=6))
        assert replies[0] == Accepted("r1")
        assert len(output(replies)[0]) == 6
        assert deltas(replies)[0].num_cached_tokens == 0
        assert all(delta.num_cached_tokens is None for delta in deltas(replies)[1:])
        again = await ask(service, request_for(prompt_of(100), max_tokens=6))
        assert output(again) == output(replies)
        assert deltas(again)[0].num_cached_tokens == 64
        await until(lambda: service.stats()["generation_tokens"] == 12)
        await service.close()
        closed = await ask(service, request_for(prompt_of(5)))
        assert isinstance(closed[0], Refused)

    asyncio.run(scenario())


def test_requests_that_cannot_be_served_are_refused_with_a_status(
    config: ReplicaConfig, request_for: Build, prompt_of: Build
) -> None:
    async def scenario() -> None:
        async with running(config) as service:
            (long,) = await ask(service, request_for(prompt_of(2048)))
            assert isinstance(long, Refused)
            assert (long.status, "2048" in long.message) == (400, True)
            (bad,) = await ask(service, request_for([10**6]))
            assert isinstance(bad, Refused)
            assert bad.status == 400
            tasks = [
                asyncio.create_task(ask(service, request_for(prompt_of(30, seed=i), max_tokens=20))) for i in range(40)
            ]
            replies = await asyncio.gather(*tasks)
            refused = [reply[0] for reply in replies if isinstance(reply[0], Refused)]
            assert refused
            assert {(refusal.status, refusal.retry_after_s) for refusal in refused} == {(429, 1)}
            served = [reply for reply in replies if isinstance(reply[0], Accepted)]
            assert all(len(output(reply)[0]) == 20 for reply in served)

    asyncio.run(scenario())


def test_an_acceptance_that_the_first_delta_overtakes_is_left_out(
    config: ReplicaConfig, request_for: Build, prompt_of: Build
) -> None:
    async def scenario() -> None:
        async with running(config) as service:
            asked = request_for(prompt_of(30), max_tokens=2)
            quick = [reply async for reply in service.generate(asked, accept_after_s=30)]
            assert all(isinstance(reply, TokenDelta) for reply in quick)
            slow = [reply async for reply in service.generate(asked, accept_after_s=1e-6)]
            assert isinstance(slow[0], Accepted)
            assert output([Accepted("r1"), *quick]) == output(slow)

    asyncio.run(scenario())


def test_closing_the_generator_cancels_the_request(config: ReplicaConfig, request_for: Build, prompt_of: Build) -> None:
    async def scenario() -> None:
        async with running(config) as service:
            replies = service.generate(request_for(prompt_of(30), max_tokens=1500))
            assert isinstance(await anext(replies), Accepted)
            await anext(replies)
            await replies.aclose()
            await until(lambda: service.stats()["request_success_abort"] == 1)
            await until(lambda: service.stats()["num_requests_running"] == 0)
            assert service.stats()["kv_cache_usage_perc"] == 0

    asyncio.run(scenario())


def test_a_broken_checkpoint_fails_the_start_in_words(config: ReplicaConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        service = ReplicaService(dataclasses.replace(config, model_path=tmp_path / "nowhere"), "r1")
        with pytest.raises(CheckpointError):
            await service.start()
        assert service.phase.phase == "failed"
        assert "nowhere" in service.phase.detail
        await service.close()

    asyncio.run(scenario())


def test_what_cannot_fit_is_refused_with_every_figure_before_loading(config: ReplicaConfig) -> None:
    async def scenario() -> None:
        greedy = dataclasses.replace(config, engine=EngineConfig(max_model_len=2048, kv_tokens=1 << 40))
        service = ReplicaService(greedy, "r1")
        with pytest.raises(
            OutOfMemory, match=r"weights .*, KV of 1099511627776 tokens .* GiB, 16 slots .* are available"
        ):
            await service.start()
        await service.close()

    asyncio.run(scenario())


def test_another_replica_and_a_restarted_one_are_warm_through_the_store(
    config: ReplicaConfig, server: EmbeddedServer, request_for: Build, prompt_of: Build
) -> None:
    lengths = (65, 200, 300, 700)
    requests = {length: request_for(prompt_of(length, seed=length), max_tokens=4) for length in lengths}

    async def scenario() -> None:
        shared = with_store(config, server)
        async with running(shared, "r1") as first, running(shared, "r2") as second:
            miss = {length: await ask(first, requests[length]) for length in lengths}
            await until(lambda: first.stats().get("store_published", 0) == len(lengths))
            await until(lambda: second.stats()["store_events_read"] >= 2 * len(lengths))
            for length in lengths:
                hit = await ask(second, requests[length])
                assert output(hit) == output(miss[length])
                start = deltas(hit)[0]
                assert (start.num_cached_tokens, start.cache_source) == ((length - 1) // 64 * 64, "store")
            rows = await asyncio.to_thread(ReplicaRows(server.address).read)
            assert {name: row.phase for name, row in rows.items()} == {"r1": "ready", "r2": "ready"}
        async with running(shared, "r3") as restarted:
            for length in lengths:
                hit = await ask(restarted, requests[length])
                assert output(hit) == output(miss[length])
                assert deltas(hit)[0].cache_source == "store"

    asyncio.run(scenario())


def test_a_store_that_comes_back_empty_is_filled_again(
    config: ReplicaConfig, server: EmbeddedServer, request_for: Build, prompt_of: Build
) -> None:
    """A checkpoint is no use to others without the KV below it, which this replica had stored before."""
    turns = [request_for(prompt_of(length), max_tokens=4) for length in (300, 700)]

    async def scenario() -> None:
        shared = with_store(config, server)
        async with running(shared, "r1") as first:
            await ask(first, turns[0])
            await until(lambda: first.stats().get("store_published", 0) == 1)
            await asyncio.to_thread(server.stop)
            with await asyncio.to_thread(EmbeddedServer, port=server.port, password=server.password):
                await until(lambda: first.stats()["store_stream_resets"] == 1)
                miss = await ask(first, turns[1])
                assert deltas(miss)[0].num_cached_tokens == 256
                # What it starts from is offered again, and what is new.
                await until(lambda: first.stats()["store_published"] == 3)
                await until(lambda: first.stats()["store_events_waiting"] == 0)
                async with running(shared, "r2") as second:
                    hit = await ask(second, turns[1])
                    assert output(hit) == output(miss)
                    assert (deltas(hit)[0].num_cached_tokens, deltas(hit)[0].cache_source) == (640, "store")

    asyncio.run(scenario())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stalled"])
def test_chats_go_on_without_the_store(
    config: ReplicaConfig, server: EmbeddedServer, request_for: Build, prompt_of: Build, how: signal.Signals
) -> None:
    async def scenario() -> None:
        shared = with_store(config, server, operation_timeout_s=0.5)
        requests = [request_for(prompt_of(200, seed=i)) for i in range(3)]
        async with running(shared, "r1") as first:
            expected = [await ask(first, request) for request in requests]
            await until(lambda: first.stats().get("store_published", 0) == 3)
        async with running(shared, "r2") as second:
            pid = server.pid
            assert pid is not None
            os.kill(pid, how)
            for request, before in zip(requests, expected, strict=True):
                replies = await ask(second, request)
                assert output(replies) == output(before)
                assert deltas(replies)[0].num_cached_tokens == 0
            await until(lambda: num_misses(second) >= 1)
            if how is signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)

    asyncio.run(scenario())


def test_a_replica_that_closes_takes_no_more_requests(
    config: ReplicaConfig, request_for: Build, prompt_of: Build
) -> None:
    async def scenario() -> None:
        service = ReplicaService(config, "r1")
        await service.start()
        closing = asyncio.create_task(service.close())
        await asyncio.sleep(0)
        late = await asyncio.wait_for(ask(service, request_for(prompt_of(5))), 10)
        assert isinstance(late[0], Refused)
        await closing

    asyncio.run(scenario())


def test_a_server_that_never_was_there_is_a_cold_start(
    config: ReplicaConfig, request_for: Build, prompt_of: Build
) -> None:
    async def scenario() -> None:
        nobody = dataclasses.replace(config, store=StoreConfig("redis://127.0.0.1:1/0"))
        async with running(nobody) as service:
            assert len(output(await ask(service, request_for(prompt_of(200))))[0]) == 4

    asyncio.run(scenario())
