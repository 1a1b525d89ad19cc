"""Answers have OpenAI's shape, streamed and whole, and say the same either way."""

import json
from typing import Any

import httpx
import pytest

from warmstate.cache_store.keys import chain_root, prefix_keys, tenant_salt
from warmstate.cluster.api.chat_service import INLINE_BODY_BYTES
from warmstate.replicas.messages import FinishReason

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def _events(http: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON of every event of a stream, which must end with [DONE]."""
    response = http.post(route, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _text(events: list[dict[str, Any]], field: str = "content", index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get(field, "") for choice in choices)


def test_a_whole_chat_answer_has_openais_shape(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda _: replica.saying("Hi 世界", cached=3)
    response = http.post(CHAT, json={**HELLO, "model": "demo"})
    body = response.json()
    num_prompt = len(replica.requests[0].token_ids)
    assert response.headers["x-warmstate-replica"] == "r1"
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi 世界"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 10,
            "total_tokens": num_prompt + 10,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda _: replica.saying("Hi 🙂", finish=FinishReason.LENGTH)
    events = _events(http, CHAT, HELLO)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]
    assert _text(events) == "Hi 🙂"
    assert all("usage" not in event for event in events)


def test_usage_is_the_last_chunk_when_asked_for_and_null_before(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda _: replica.saying("Hi", cached=2)
    *events, last = _events(http, CHAT, {**HELLO, "stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert last["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in events)


@pytest.mark.parametrize("per_step", [1, 2, 7, 100])
def test_a_stop_string_ends_the_answer_wherever_steps_cut_it(http: httpx.Client, replica: Any, per_step: int) -> None:
    replica.script = lambda _: replica.saying("one two STOP three", per_step=per_step)
    body = {**HELLO, "stop": ["STOP", "never"]}
    whole = http.post(CHAT, json=body).json()
    assert whole["choices"][0]["message"]["content"] == "one two "
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == len("one two STOP")
    assert _text(_events(http, CHAT, body)) == "one two "
    with_stop = http.post(CHAT, json={**body, "include_stop_str_in_output": True}).json()
    assert with_stop["choices"][0]["message"]["content"] == "one two STOP"


def test_a_stop_string_before_min_tokens_is_text(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda _: replica.saying("a.b.c.d")
    body = http.post(CHAT, json={**HELLO, "stop": ".", "min_tokens": 3}).json()
    assert body["choices"][0]["message"]["content"] == "a.b"


def test_a_stop_string_that_never_completes_is_shown_at_the_end(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda _: replica.saying("one STO")
    assert _text(_events(http, CHAT, {**HELLO, "stop": "STOP"})) == "one STO"


def test_reasoning_goes_out_under_both_names_and_is_counted(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda _: replica.saying("<think>\nhmm\n</think>\n\nYes")
    body = http.post(CHAT, json=HELLO).json()
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "hmm",
        "reasoning": "hmm",
    }
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("\nhmm\n")
    events = _events(http, CHAT, HELLO)
    assert _text(events) == "Yes"
    assert _text(events, "reasoning_content") == _text(events, "reasoning") == "hmm"


def test_plain_completions_do_not_split_reasoning(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda _: replica.saying("<think>hmm</think>Yes")
    assert http.post(COMPLETIONS, json={"prompt": "x"}).json()["choices"][0]["text"] == "<think>hmm</think>Yes"


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_show_only_when_asked_for_and_the_end_of_turn_never(
    http: httpx.Client, replica: Any, special: bool
) -> None:
    replica.script = lambda _: replica.saying("a<|endoftext|>b")
    body = http.post(CHAT, json={**HELLO, "skip_special_tokens": not special}).json()
    assert body["choices"][0]["message"]["content"] == ("a<|endoftext|>b" if special else "ab")


def test_several_choices_are_separate_requests_with_seeds_of_their_own(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda request: replica.saying(f"seed {request.sampling.seed}", cached=4)
    body = http.post(CHAT, json={**HELLO, "n": 3, "seed": 2**63 - 1}).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == [f"seed {seed}" for seed in (2**63 - 1, -(2**63), -(2**63) + 1)]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == len(replica.requests[0].token_ids)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert len({request.request_id for request in replica.requests}) == 3
    events = _events(http, CHAT, {**HELLO, "n": 3, "seed": 1})
    assert [_text(events, index=i) for i in range(3)] == ["seed 1", "seed 2", "seed 3"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_all_four_spellings_of_a_prompt(
    http: httpx.Client, replica: Any, prompt: Any, expected: list[list[int]]
) -> None:
    replica.script = lambda _: replica.saying("!")
    body = http.post(COMPLETIONS, json={"prompt": prompt, "n": 2, "echo": True}).json()
    asked = [request.token_ids.tolist() for request in replica.requests]
    assert asked == [ids for ids in expected for _ in range(2)]
    assert [choice["text"] for choice in body["choices"]] == [bytes(ids).decode() + "!" for ids in asked]
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_a_streamed_completion_has_openais_shape(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda _: replica.saying("yz")
    events = _events(http, COMPLETIONS, {"prompt": "x", "echo": True})
    assert all(event["object"] == "text_completion" for event in events)
    assert "".join(event["choices"][0]["text"] for event in events) == "xyz"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[0]["id"].startswith("cmpl-")


def test_chat_logprobs_have_bytes_and_alternatives(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda _: replica.saying("é", logprobs=True, finish=FinishReason.LENGTH)
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    entries = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert replica.requests[0].sampling.logprobs == 2
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9]]
    assert entries[0]["logprob"] == -0.5
    assert [alternative["logprob"] for alternative in entries[0]["top_logprobs"]] == [-0.5, -9999.0]
    assert entries[0]["top_logprobs"][1]["token"] == "A"
    streamed = [choice for event in _events(http, CHAT, body) for choice in event["choices"] if choice["logprobs"]]
    assert [entry for choice in streamed for entry in choice["logprobs"]["content"]] == entries


def test_logprobs_without_alternatives_report_the_chosen_token_alone(http: httpx.Client, replica: Any) -> None:
    http.post(CHAT, json={**HELLO, "logprobs": True})
    http.post(CHAT, json=HELLO)
    assert [request.sampling.logprobs for request in replica.requests] == [0, None]


def test_completion_logprobs_have_the_legacy_shape(http: httpx.Client, replica: Any) -> None:
    replica.script = lambda _: replica.saying("yz", logprobs=True, finish=FinishReason.LENGTH)
    body = {"prompt": "x", "logprobs": 1}
    whole = http.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
    assert whole == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["y", "z"],
        "top_logprobs": [{"y": -0.5, "A": -9999.0}, {"z": -0.5, "A": -9999.0}],
    }
    pieces = [event["choices"][0]["logprobs"] for event in _events(http, COMPLETIONS, body)]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == [0, 1]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_token_ids_are_returned_when_asked_for(http: httpx.Client, replica: Any, route: str) -> None:
    replica.script = lambda _: replica.saying("🙂!")
    body = (HELLO if route == CHAT else {"prompt": "x"}) | {"return_token_ids": True}
    whole = http.post(route, json=body).json()
    events = _events(http, route, body)
    prompt_ids = replica.requests[0].token_ids.tolist()
    holder = whole if route == CHAT else whole["choices"][0]
    first = events[0] if route == CHAT else events[0]["choices"][0]
    assert holder["prompt_token_ids"] == first["prompt_token_ids"] == prompt_ids
    assert whole["choices"][0]["token_ids"] == [*"🙂!".encode(), 258]
    streamed = [event["choices"][0].get("token_ids", []) for event in events]
    assert [token_id for piece in streamed for token_id in piece] == [*"🙂!".encode(), 258]


def test_a_request_carries_keys_marks_and_sampling_to_the_replica(http: httpx.Client, replica: Any) -> None:
    long_talk = {"messages": [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "u" * 100}]}
    http.post(CHAT, json={**long_talk, "temperature": 0, "top_k": -1, "stop_token_ids": [7], "logit_bias": {"5": 2}})
    (request,) = replica.requests
    assert request.chain_root == chain_root()
    assert request.prompt_keys == b"".join(prefix_keys(request.token_ids, chain_root()))
    assert len(request.prompt_keys) == 32 * (len(request.token_ids) // 64)
    assert [mark.kind for mark in request.marks] == ["system", "turn"]
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 0)
    assert request.sampling.stop_token_ids == {7}
    assert request.sampling.logit_bias == {5: 2.0}
    assert request.sampling.max_tokens == 512 - len(request.token_ids)


def test_cache_hints_become_marks_and_change_no_prompt(http: httpx.Client, replica: Any) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "look"}}
    part = {"type": "text", "text": "Look at this."}
    answer, question = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}
    plain = {"messages": [{"role": "user", "content": [part]}, answer, question], "tools": [tool]}
    hinted = {
        "messages": [{"role": "user", "content": [{**part, **hint}]}, {**answer, **hint}, question],
        "tools": [
            {**tool, **hint},
        ],
    }
    for body in (plain, hinted):
        assert http.post(CHAT, json=body).status_code == 200
    unhinted, request = replica.requests
    assert request.prompt_keys == unhinted.prompt_keys
    assert [mark.kind for mark in unhinted.marks] == ["system", "turn"]
    assert [mark.kind for mark in request.marks] == ["hint", "system", "hint", "hint", "turn"]


def test_cache_hints_of_a_completion_are_token_positions(http: httpx.Client, replica: Any) -> None:
    assert http.post("/v1/completions", json={"prompt": [1, 2, 3], "cache_hints": [2, 3]}).status_code == 200
    assert [(mark.kind, mark.position) for mark in replica.requests[0].marks] == [("hint", 2), ("hint", 3)]


def test_a_cache_salt_makes_other_keys(http: httpx.Client, replica: Any) -> None:
    http.post(CHAT, json={**HELLO, "cache_salt": "mine"})
    assert replica.requests[0].chain_root == chain_root(tenant_salt(b"secret", "", "mine"))


def test_history_reaches_the_template_as_it_needs_it(http: httpx.Client, replica: Any, tokenizer: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": '{"at": '}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": None, "reasoning": "I will.", "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    tools = [{"type": "function", "function": {"strict": True, "description": "Looks.", "name": "look"}}]
    response = http.post(CHAT, json={"messages": messages, "tools": tools, "tool_choice": "none"})
    assert response.status_code == 200, response.text
    prompt = tokenizer.decode(replica.requests[0].token_ids)
    assert "Look there" in prompt
    assert "<think>\nI will.\n</think>" in prompt
    assert '{"name": "look", "arguments": {"at": "it"}}' in prompt
    assert json.dumps(tools[0]) in prompt


def test_template_switches_reach_the_template(http: httpx.Client, replica: Any, tokenizer: Any) -> None:
    http.post(CHAT, json={**HELLO, "chat_template_kwargs": {"enable_thinking": False}})
    assert tokenizer.decode(replica.requests[0].token_ids).endswith("<think>\n\n</think>\n\n")


def test_the_model_list_has_openais_shape(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("demo", "model", 512)
    assert http.get("/v1/models/demo").json() == model


def test_a_large_body_is_prepared_in_a_thread_with_the_same_outcome(http: httpx.Client, replica: Any) -> None:
    for padding in ("", "x" * 2 * INLINE_BODY_BYTES):
        assert http.post(CHAT, json={**HELLO, "metadata": {"padding": padding}}).status_code == 200
        assert http.post(COMPLETIONS, json={"prompt": "x", "user": padding}).status_code == 200
        refused = http.post(CHAT, json={"messages": [{"role": "user", "content": "y" * 600}], "user": padding})
        assert refused.status_code == 400
    small, large = replica.requests[:2], replica.requests[2:]
    assert [r.token_ids.tolist() for r in small] == [r.token_ids.tolist() for r in large]
    assert [r.prompt_keys for r in small] == [r.prompt_keys for r in large]
