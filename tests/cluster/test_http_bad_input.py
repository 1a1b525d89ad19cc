"""Bad input gets OpenAI's error object with the field's name, and never reaches a replica."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from warmstate.cluster.api.http_app import HttpLimits

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}

NUMBERS: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 1e6),
    ("temperature", "0.5"),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 2),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", 101),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 10**30),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 10_000),
    ("n", 0),
    ("n", 17),
    ("n", "2"),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", 5),
    ("stop", ["x"] * 17),
    ("stop[1]", ["x", ""]),
    ("stop_token_ids", [99_999]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids[0]", ["x"]),
    ("logit_bias", {"99999": 1.0}),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {"-1": 1.0}),
    ("logit_bias.5", {"5": 101}),
    ("logit_bias", [5]),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("ignore_eos", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("model", 5),
    ("return_token_ids", "no"),
]

CHAT_FIELDS: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "Hello"),
    ("messages", None),
    ("messages[0]", ["Hello"]),
    ("messages[0].role", [{"role": "robot", "content": "x"}]),
    ("messages[0].role", [{"content": "x"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[1].content", [*HELLO, {"role": "tool", "content": None}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages[0].tool_calls[0].function", [{"role": "assistant", "tool_calls": [{"id": "x"}]}]),
    ("messages", [{"role": "user", "content": "x"}, {"role": "system", "content": "too late"}]),
    ("max_completion_tokens", 0),
    ("logprobs", 5),
    ("top_logprobs", 21),
    ("top_logprobs", 2),
    ("tools[0]", [{"type": "function"}]),
    ("tools", {}),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("response_format", {"type": "json_object"}),
    ("chat_template_kwargs", {"chat_template": "{{ 7 }}"}),
    ("chat_template_kwargs", [1]),
    ("messages", [{"role": "user", "content": "x" * 600}]),
    ("messages[0].cache_control.type", [{**HELLO[0], "cache_control": {"type": "persistent"}}]),
    ("messages[0].cache_control", [{**HELLO[0], "cache_control": True}]),
    (
        "messages[0].content[0].cache_control.type",
        [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}],
    ),
    ("messages", [{**HELLO[0], "cache_control": {"type": "ephemeral"}}] * 5),
    ("tools[0]", [{**TOOL, "cache_control": {"type": "persistent"}}]),
    ("tools", [{**TOOL, "cache_control": {"type": "ephemeral"}}] * 5),
]

PROMPTS: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", ["a", ""]),
    ("prompt", ["a", 5]),
    ("prompt", [1, "a"]),
    ("prompt", [1.5]),
    ("prompt", [[1], []]),
    ("prompt", [10**12]),
    ("prompt", [-1]),
    ("prompt", ["x"] * 129),
    ("logprobs", 21),
    ("logprobs", True),
    ("suffix", "x"),
    ("cache_hints", 64),
    ("cache_hints", [1, 2, 3, 4, 5]),
    ("cache_hints[1]", [1, 0]),
    ("cache_hints[0]", [1.5]),
    ("cache_hints", [6]),
]


def _cases() -> Iterator[Any]:
    for route, fields in ((CHAT, [*NUMBERS, *CHAT_FIELDS]), (COMPLETIONS, [*NUMBERS, *PROMPTS])):
        for param, value in fields:
            yield pytest.param(route, param, value, id=f"{route.rsplit('/', 2)[-2]}-{param}={value!r:.40}")


def _error(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, dict[str, Any]] = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return body["error"]


@pytest.mark.parametrize(("route", "param", "value"), [*_cases()])
def test_a_bad_field_is_a_400_that_names_it(
    http: httpx.Client, replica: Any, route: str, param: str, value: Any
) -> None:
    field = param.split("[")[0].split(".")[0]
    body = {"messages": HELLO} if route == CHAT else {"prompt": "Hello"}
    response = http.post(route, content=json.dumps({**body, field: value}))
    error = _error(response)
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert not replica.requests


def test_too_many_stop_strings_are_told_their_limit(http: httpx.Client) -> None:
    body = {"messages": HELLO, "stop": ["x"] * 17}
    assert "at most 16" in _error(http.post(CHAT, content=json.dumps(body)))["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"messages": [{"role": "user", "content": "\\ud800"}]}']
)
def test_a_body_that_is_not_a_json_object_is_a_400(http: httpx.Client, body: bytes) -> None:
    response = http.post(CHAT, content=body)
    assert response.status_code == 400
    assert _error(response)["message"].startswith("body: ")


def test_deeply_nested_json_is_a_400(http: httpx.Client) -> None:
    response = http.post(CHAT, content=b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert response.status_code == 400


def test_unknown_and_null_fields_are_ignored(http: httpx.Client) -> None:
    nulls = dict.fromkeys([*{name.split("[")[0].split(".")[0] for name, _ in NUMBERS}, "tools", "tool_choice", "user"])
    response = http.post(CHAT, json={**nulls, "messages": HELLO, "from_the_future": {"x": 1}, "metadata": {"a": "b"}})
    assert response.status_code == 200, response.text


def test_an_unknown_model_is_a_404(http: httpx.Client) -> None:
    response = http.post(CHAT, json={"model": "gpt-9", "messages": HELLO})
    assert response.status_code == 404
    assert _error(response)["code"] == "model_not_found"
    assert http.get("/v1/models/gpt-9").status_code == 404


def test_a_prompt_over_the_context_tells_both_numbers(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={"prompt": [65] * 512})
    assert response.status_code == 400
    assert "maximum context length is 512 tokens" in _error(response)["message"]
    assert "the prompt has 512" in _error(response)["message"]
    assert _error(response)["param"] == "prompt"
    assert http.post(COMPLETIONS, json={"prompt": [65] * 511}).status_code == 200


def test_a_chat_over_the_context_names_the_messages(http: httpx.Client) -> None:
    response = http.post(CHAT, json={"messages": [{"role": "user", "content": "word " * 600}]})
    assert response.status_code == 400
    assert _error(response)["param"] == "messages"


def test_prompt_and_max_tokens_together_over_the_context_tell_all_numbers(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={"prompt": [65] * 500, "max_tokens": 13})
    error = _error(response)
    assert response.status_code == 400
    assert error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("512", "500", "13"))


def test_unknown_routes_and_methods_get_the_error_object(http: httpx.Client) -> None:
    missing, wrong_method = http.get("/v1/nothing"), http.get(CHAT)
    assert missing.status_code == 404
    assert "/v1/nothing" in _error(missing)["message"]
    assert wrong_method.status_code == 405
    assert _error(wrong_method)["type"] == "invalid_request_error"


def test_a_body_over_the_limit_is_a_413_with_and_without_its_length(serve: Callable[..., str], replica: Any) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 300}]}).encode()
    with httpx.Client(base_url=serve(HttpLimits(max_body_bytes=len(body) - 1))) as client:
        declared = client.post(CHAT, content=body)
        chunked = client.post(CHAT, content=iter([body[:100], body[100:]]))
    for response in (declared, chunked):
        assert response.status_code == 413
        assert str(len(body) - 1) in _error(response)["message"]
    assert not replica.requests


def test_a_body_at_the_limit_passes(serve: Callable[..., str]) -> None:
    body = json.dumps({"messages": HELLO}).encode()
    with httpx.Client(base_url=serve(HttpLimits(max_body_bytes=len(body)))) as client:
        assert client.post(CHAT, content=iter([body])).status_code == 200
