"""A chat over the real server: what a client of the OpenAI API sees."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.cluster

Eventually = Callable[..., None]


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_a_stream_begun_as_soon_as_it_is_ready_arrives_whole(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="demo", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert len("".join(chunk.text for chunk in chunks)) > 0
    assert chunks[-1].finish_reason == "length"


def test_a_chat_streams_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello!"}],
        max_completion_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ) as stream:
        chunks = list(stream)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert sum(1 for chunk in chunks if chunk.choices) > 2
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 8


def test_the_second_turn_is_warm_and_says_exactly_how_warm(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You are a patient teacher of old languages. " * 6},
        {"role": "user", "content": "How does one say good morning? " * 4},
    ]
    first = ask(client, messages)
    answer = first.choices[0].message.content
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And good night?"}]
    second = ask(client, messages)
    before, after = prompt_ids(first), prompt_ids(second)
    shared = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(before))
    assert cached_tokens(first) == 0
    assert cached_tokens(second) == shared // 64 * 64 > 0


def ask(client: openai.OpenAI, messages: list[Any]) -> Any:
    return client.chat.completions.create(
        model="demo",
        messages=messages,
        max_completion_tokens=12,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )


def prompt_ids(answer: Any) -> list[int]:
    ids: list[int] = answer.prompt_token_ids
    return ids


def cached_tokens(answer: Any) -> int:
    cached: int = answer.usage.prompt_tokens_details.cached_tokens
    return cached


def test_the_sequences_of_one_request_each_get_what_they_get_alone(client: openai.OpenAI) -> None:
    def texts(prompt: str | list[str], n: int) -> list[str]:
        answer = client.completions.create(
            model="demo", prompt=prompt, n=n, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}, timeout=60
        )
        return [choice.text for choice in answer.choices]

    alone = [texts(prompt, 1)[0] for prompt in ("a b c", "d e f")]
    assert texts(["a b c", "d e f"], 2) == [alone[0], alone[0], alone[1], alone[1]]


def test_sixteen_mixed_requests_at_once_each_get_what_they_get_alone(server: Any, replica_ids: list[str]) -> None:
    rng = random.Random(16)
    requests: list[dict[str, Any]] = [
        {
            "prompt": [rng.randrange(1, 250) for _ in range(rng.randrange(1, 300))],
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0, 0.7, 1.3]),
            "seed": index,
            "logprobs": 2,
            "ignore_eos": True,
        }
        for index in range(16)
    ]

    def answer(fields: dict[str, Any]) -> tuple[list[int], list[float]]:
        choice = server.complete(**fields).json()["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(answer, requests))
    alone = [answer(fields) for fields in requests]
    assert together == alone
    assert [len(tokens) for tokens, _ in alone] == [fields["max_tokens"] for fields in requests]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "model": "other"}, 404, "model"),
    ],
)
def test_bad_input_is_refused_by_name(server: Any, body: dict[str, Any], status: int, param: str) -> None:
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


def test_a_prompt_longer_than_the_context_gives_both_numbers(server: Any) -> None:
    response = server.complete([1] * 70_000, max_tokens=1)
    assert response.status_code == 400
    assert "70000" in response.json()["error"]["message"]
    assert "65536" in response.json()["error"]["message"]


def test_an_unknown_replica_is_404_and_names_itself(server: Any) -> None:
    response = server.complete("x", "nobody", max_tokens=1)
    assert response.status_code == 404
    assert "nobody" in response.json()["error"]["message"]


def test_a_body_over_the_limit_is_413(server: Any) -> None:
    response = server.http.post("/v1/completions", content=b" " * (33 << 20))
    assert response.status_code == 413


def test_a_client_that_leaves_frees_the_replica(server: Any, eventually: Eventually) -> None:
    body = {"prompt": "x", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        # Held on to: an iterator that is dropped closes the connection.
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        eventually(lambda: server.metric("num_requests_running") == 1)
    eventually(lambda: server.metric("num_requests_running") == 0)


def test_clients_that_leave_before_they_are_answered_free_the_replica(server: Any, eventually: Eventually) -> None:
    body = {"prompt": "x", "max_tokens": 60_000, "ignore_eos": True}
    for _ in range(8):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
    eventually(lambda: server.metric("num_requests_running") == 0)


def test_the_request_id_comes_back_once(server: Any) -> None:
    response = server.http.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert response.headers.get_list("x-request-id") == ["mine-1"]


def test_metrics_tell_the_figures_of_every_replica(server: Any, replica_ids: list[str], eventually: Eventually) -> None:
    asked = {replica_id: server.metric("prefix_cache_queries", replica_id) for replica_id in replica_ids}
    for replica_id in replica_ids:
        assert server.complete([1] * 50, replica_id, max_tokens=3).status_code == 200
    for replica_id, before in asked.items():
        eventually(lambda who=replica_id, so_far=before: server.metric("prefix_cache_queries", who) >= so_far + 50)
