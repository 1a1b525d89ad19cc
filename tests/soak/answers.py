"""Owns one request over HTTP and what came of it, streamed or not, heard to its end or left."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from warmstate.tests.soak.conversations import Question


@dataclass
class Answer:
    """What the client heard; `failure` is None unless it was let down."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    num_cached_tokens: int | None = None
    was_left: bool = False
    failure: str | None = None


def ask(http: httpx.Client, question: Question) -> Answer:
    """Sends one request; a stream is left after so many events, if at all."""
    answer = Answer()
    try:
        with http.stream("POST", question.route, json=question.body) as response:
            if response.status_code != 200:
                answer.failure = f"{response.status_code}: {response.read().decode()[:300]}"
            elif question.body["stream"]:
                _read_events(response.iter_lines(), answer, question.leave_after)
            else:
                _take(json.loads(response.read()), answer)
    except httpx.HTTPError as error:
        answer.failure = f"{type(error).__name__}: {error}"
    return answer


def _read_events(lines: Iterator[str], answer: Answer, leave_after: int | None) -> None:
    for number, line in enumerate(line for line in lines if line):
        event = line.removeprefix("data: ")
        if event == "[DONE]":
            return
        if number == leave_after:
            answer.was_left = True
            return
        chunk = json.loads(event)
        if "error" in chunk:
            answer.failure = str(chunk["error"])
            return
        _take(chunk, answer)
    answer.failure = "the stream ended without [DONE]"


def _take(shown: dict[str, Any], answer: Answer) -> None:
    """A whole answer or one chunk of it."""
    choice = shown["choices"][0]
    answer.prompt = shown.get("prompt_token_ids") or choice.get("prompt_token_ids") or answer.prompt
    answer.tokens += choice.get("token_ids") or []
    answer.text += (choice.get("message") or choice.get("delta") or {}).get("content") or ""
    if shown.get("usage"):
        answer.num_cached_tokens = shown["usage"]["prompt_tokens_details"]["cached_tokens"]
