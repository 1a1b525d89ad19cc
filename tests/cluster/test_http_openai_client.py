"""The openai Python client drives the API over real HTTP."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from warmstate.replicas.messages import FinishReason, Refused, TokenDelta

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(url: str, replica: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_and_its_second_turn(client: openai.OpenAI, replica: Any) -> None:
    replica.script = lambda request: replica.saying("Hi 🙂", cached=len(request.token_ids) // 64 * 64)
    first = client.chat.completions.create(model="demo", messages=HELLO, temperature=0)
    answer = first.choices[0].message
    assert answer.content == "Hi 🙂"
    turns = [*HELLO, answer.model_dump(exclude_none=True), {"role": "user", "content": "Say that again, please. " * 4}]
    second = client.chat.completions.create(model="demo", messages=turns)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens // 64 * 64


def test_a_streamed_chat(client: openai.OpenAI, replica: Any) -> None:
    replica.script = lambda _: replica.saying("<think>hm</think>Hi 🙂")
    stream = client.chat.completions.create(
        model="demo", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Hi 🙂"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_completions_models_and_logprobs(client: openai.OpenAI, replica: Any) -> None:
    replica.script = lambda _: replica.saying("yz", logprobs=True)
    completion = client.completions.create(model="demo", prompt="x", logprobs=1)
    assert completion.choices[0].text == "yz"
    assert completion.choices[0].logprobs is not None
    chat = client.chat.completions.create(model="demo", messages=HELLO, logprobs=True, top_logprobs=1)
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert bytes(chat.choices[0].logprobs.content[0].bytes or []) == b"y"
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_errors_arrive_as_the_clients_own_exceptions(client: openai.OpenAI, replica: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    replica.script = lambda _: [Refused(429, "full", 1)]
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="demo", messages=HELLO)


def test_an_error_in_the_middle_of_a_stream_is_raised_by_the_client(client: openai.OpenAI, replica: Any) -> None:
    broken = TokenDelta((), finish_reason=FinishReason.ERROR, error="NaN in the logits")
    replica.script = lambda _: [*replica.saying("Hel", finish=None), broken]
    stream = client.chat.completions.create(model="demo", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="NaN in the logits"):
        list(stream)
