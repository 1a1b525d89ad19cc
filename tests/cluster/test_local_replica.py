"""A chat through the HTTP API, one real replica and the real model, without Ray."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint

WithReplica = Callable[[Path, Callable[[httpx.AsyncClient], Awaitable[None]]], None]

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are terse. " * 10}
FIRST = [SYSTEM, {"role": "user", "content": "What is a prefix? " * 8}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_demo_checkpoint(directory, size="tiny", dtype=torch.float32)
    return directory


async def _chat(client: httpx.AsyncClient, messages: Any, **fields: Any) -> dict[str, Any]:
    response = await client.post(CHAT, json={"messages": messages, "temperature": 0, "max_tokens": 8, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["x-warmstate-replica"] == "only"
    body: dict[str, Any] = response.json()
    return body


def test_the_second_turn_resumes_at_the_first_ones_mark_and_says_what_a_cold_one_says(
    checkpoint: Path, with_local_replica: WithReplica
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        first = await _chat(client, FIRST, return_token_ids=True)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        turns = [*FIRST, answer, {"role": "user", "content": "And a suffix?"}]
        warm = await _chat(client, turns, return_token_ids=True)
        mark = first["usage"]["prompt_tokens"] - len("\x00assistant\n")
        # More where the template replays the answer as it was given.
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= mark // 64 * 64
        cold = await _chat(client, turns, return_token_ids=True, cache_salt="cold")
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]

    with_local_replica(checkpoint, work)


def test_another_conversation_with_the_same_system_prompt_starts_warm(
    checkpoint: Path, with_local_replica: WithReplica
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        await _chat(client, FIRST)
        other = await _chat(client, [SYSTEM, {"role": "user", "content": "Something else altogether."}])
        block = len("\x00system\n" + SYSTEM["content"] + "\x00\n")
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == block // 64 * 64 > 0

    with_local_replica(checkpoint, work)


def test_streams_choices_and_pins(checkpoint: Path, with_local_replica: WithReplica) -> None:
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

    with_local_replica(checkpoint, work)


def test_what_follows_an_answer_that_ended_on_a_stop_string_resumes_at_its_end(
    checkpoint: Path, with_local_replica: WithReplica
) -> None:
    prompt = list(range(40, 100))
    body = {"prompt": prompt, "seed": 1, "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}

    async def complete(client: httpx.AsyncClient, **fields: Any) -> Any:
        response = await client.post("/v1/completions", json={**body, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def work(client: httpx.AsyncClient) -> None:
        text = (await complete(client, cache_salt="whole"))["choices"][0]["text"]
        for start in range(60, len(text) - 4):
            stop, salt = text[start : start + 4], f"stopped at {start}"
            choice = (await complete(client, stop=stop, cache_salt=salt))["choices"][0]
            # Far from the next boundary, so that steps under way when the stop is found do not reach it.
            if 132 <= len(prompt) + len(choice["token_ids"]) <= 144:
                break
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == text[: text.index(stop)]
        following = [*prompt, *choice["token_ids"], 50, 51]
        warm = await complete(client, prompt=following, max_tokens=8, cache_salt=salt)
        cold = await complete(client, prompt=following, max_tokens=8, cache_salt="cold")
        cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == 128
        assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]

    with_local_replica(checkpoint, work)
