"""A chat through the HTTP API, one real replica and the real model, without Ray."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from warmstate.cluster.api.chat_service import ChatService
from warmstate.cluster.api.http_app import build_http_app
from warmstate.cluster.local_replica import LocalReplica
from warmstate.cluster.model_card import read_model_card
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint
from warmstate.replicas.config import CacheConfig, EngineConfig, ReplicaConfig
from warmstate.replicas.service import ReplicaService

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are terse. " * 10}
FIRST = [SYSTEM, {"role": "user", "content": "What is a prefix? " * 8}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_demo_checkpoint(directory, size="tiny", dtype=torch.float32)
    return directory


@asynccontextmanager
async def _api(checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    engine = EngineConfig(max_model_len=2048, max_batch_tokens=256, max_sequences=4, kv_tokens=8192)
    config = ReplicaConfig(
        checkpoint, torch.float32, True, 1, engine, CacheConfig(host_bytes=64 << 20, fetch_policy="always")
    )
    replica = ReplicaService(config, "only")
    card = read_model_card(checkpoint, "demo", engine.max_model_len)
    service = ChatService.from_checkpoint(LocalReplica(replica, "only"), card, checkpoint, b"secret")
    transport = httpx.ASGITransport(build_http_app(service))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            loading = await client.post(CHAT, json={"messages": FIRST})
            assert (loading.status_code, loading.headers["retry-after"]) == (503, "1")
            assert (await client.get("/health")).status_code == 503
            await replica.start()
            yield client
    finally:
        service.close()
        await replica.close()


def _run(checkpoint: Path, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with _api(checkpoint) as client:
            await work(client)

    asyncio.run(asyncio.wait_for(main(), 120))


async def _chat(client: httpx.AsyncClient, messages: Any, **fields: Any) -> dict[str, Any]:
    response = await client.post(CHAT, json={"messages": messages, "temperature": 0, "max_tokens": 8, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["x-warmstate-replica"] == "only"
    body: dict[str, Any] = response.json()
    return body


def test_the_second_turn_resumes_at_the_first_ones_mark_and_says_what_a_cold_one_says(checkpoint: Path) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        first = await _chat(client, FIRST, return_token_ids=True)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        turns = [*FIRST, answer, {"role": "user", "content": "And a suffix?"}]
        warm = await _chat(client, turns, return_token_ids=True)
        mark = first["usage"]["prompt_tokens"] - len("\x00assistant\n")
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == mark // 64 * 64
        cold = await _chat(client, turns, return_token_ids=True, cache_salt="cold")
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]

    _run(checkpoint, work)


def test_another_conversation_with_the_same_system_prompt_starts_warm(checkpoint: Path) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        await _chat(client, FIRST)
        other = await _chat(client, [SYSTEM, {"role": "user", "content": "Something else altogether."}])
        block = len("\x00system\n" + SYSTEM["content"] + "\x00\n")
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == block // 64 * 64 > 0

    _run(checkpoint, work)


def test_streams_choices_and_pins(checkpoint: Path) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        whole = await _chat(client, FIRST)
        body = {"messages": FIRST, "temperature": 0, "max_tokens": 8, "stream": True}
        streamed = await client.post(CHAT, json=body)
        events = [json.loads(event.removeprefix("data: ")) for event in streamed.text.split("\n\n")[:-2]]
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert text == whole["choices"][0]["message"]["content"]
        seeded = {"messages": FIRST, "temperature": 1, "max_tokens": 8, "seed": 3, "n": 2, "return_token_ids": True}
        once, again = [(await client.post(CHAT, json=seeded)).json() for _ in range(2)]
        ids = [choice["token_ids"] for choice in once["choices"]]
        assert ids == [choice["token_ids"] for choice in again["choices"]]
        assert ids[0] != ids[1]
        pinned = await client.post(CHAT, json=body, headers={"x-warmstate-replica": "another"})
        assert pinned.status_code == 404
        assert (await client.get("/health")).status_code == 200

    _run(checkpoint, work)
