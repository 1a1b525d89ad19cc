"""Owns the bytes of answers: OpenAI's objects for whole answers and for stream chunks. Knows no replica.

Chunks are put together from a constant head and tail; only what changes is encoded.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from warmstate.cluster.api.choice import Choice, ChoiceDelta
from warmstate.cluster.api.generation import Usage
from warmstate.cluster.api.logprobs import LegacyLogprobs, chat_logprobs
from warmstate.cluster.errors import ApiError
from warmstate.cluster.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every object of one answer repeats, and what the request asked to see."""

    id: str
    created: int
    model: str
    include_usage: bool = False
    return_token_ids: bool = False
    with_logprobs: bool = False


class ResponseBuilder(ABC):
    """Builds one request's answer, streamed or whole."""

    whole_object: str
    chunk_object: str

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._start = "data: " + to_json(self._fields(self.chunk_object))[:-1] + ',"choices":[{"index":'
        self._end = '}],"usage":null}\n\n' if head.include_usage else "}]}\n\n"

    @abstractmethod
    def first_chunks(self, choices: Sequence[Choice]) -> bytes:
        """The chunks that come before any token."""

    @abstractmethod
    def chunk(self, delta: ChoiceDelta) -> bytes:
        """The chunks of one delta."""

    @abstractmethod
    def _whole_choice(self, choice: Choice, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """One finished choice."""

    def _whole_extras(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Further fields of a whole answer."""
        return {}

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk before the end of a stream that was asked for usage."""
        fields = self._fields(self.chunk_object) | {"choices": [], "usage": usage_fields(usage)}
        return f"data: {to_json(fields)}\n\n".encode()

    def whole(self, choices: Sequence[Choice], deltas: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        """The answer to a request that is not streamed."""
        of_choice: list[list[ChoiceDelta]] = [[] for _ in choices]
        for delta in deltas:
            of_choice[delta.index].append(delta)
        fields = self._fields(self.whole_object) | {
            "choices": [self._whole_choice(choice, of_choice[choice.index]) for choice in choices],
            "usage": usage_fields(usage),
        }
        return to_json(fields | self._whole_extras(choices)).encode()

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": self._head.id, "object": kind, "created": self._head.created, "model": self._head.model}

    def _frame(self, index: int, middle: str) -> str:
        return f"{self._start}{index},{middle}{self._end}"


class ChatResponses(ResponseBuilder):
    """chat.completion and chat.completion.chunk. Reasoning goes out under both names that clients read."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunks(self, choices: Sequence[Choice]) -> bytes:
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        frames = [self._frame(choice.index, role) for choice in choices]
        if self._head.return_token_ids:
            prompt = to_json(choices[0].prompt.token_ids.tolist())
            frames[0] = frames[0].replace('"choices":', f'"prompt_token_ids":{prompt},"choices":', 1)
        return "".join(frames).encode()

    def chunk(self, delta: ChoiceDelta) -> bytes:
        frames = ""
        if delta.reasoning:
            text = to_json(delta.reasoning)
            shown = f'{{"reasoning_content":{text},"reasoning":{text}}}'
            if not (delta.content or delta.finish_reason):
                return self._frame(delta.index, self._middle(shown, delta)).encode()
            frames = self._frame(delta.index, f'"delta":{shown},"logprobs":null,"finish_reason":null')
        shown = f'{{"content":{to_json(delta.content)}}}' if delta.content else "{}"
        return (frames + self._frame(delta.index, self._middle(shown, delta))).encode()

    def _middle(self, shown: str, delta: ChoiceDelta) -> str:
        logprobs = to_json(chat_logprobs(delta.logprobs, self._tokenizer)) if self._head.with_logprobs else "null"
        token_ids = f',"token_ids":{to_json(delta.token_ids)}' if self._head.return_token_ids else ""
        return f'"delta":{shown},"logprobs":{logprobs},"finish_reason":{to_json(delta.finish_reason)}{token_ids}'

    def _whole_choice(self, choice: Choice, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(delta.content for delta in deltas)}
        if thoughts := "".join(delta.reasoning for delta in deltas):
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(logprobs, self._tokenizer) if self._head.with_logprobs else None,
            "finish_reason": choice.finish_reason,
        } | _token_ids(self._head, deltas)

    def _whole_extras(self, choices: Sequence[Choice]) -> dict[str, Any]:
        if not self._head.return_token_ids:
            return {}
        return {"prompt_token_ids": choices[0].prompt.token_ids.tolist()}


class CompletionResponses(ResponseBuilder):
    """text_completion, whole and streamed. `echo` puts the prompt before the text."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer, *, echo: bool) -> None:
        super().__init__(head, tokenizer)
        self._echo = echo
        self._logprobs: dict[int, LegacyLogprobs] = {}

    def first_chunks(self, choices: Sequence[Choice]) -> bytes:
        frames = []
        for choice in choices:
            text = to_json(choice.prompt.text if self._echo else "")
            ids = (
                f',"prompt_token_ids":{to_json(choice.prompt.token_ids.tolist())}'
                if self._head.return_token_ids
                else ""
            )
            if self._echo or ids:
                frames.append(self._frame(choice.index, f'"text":{text},"logprobs":null,"finish_reason":null{ids}'))
        return "".join(frames).encode()

    def chunk(self, delta: ChoiceDelta) -> bytes:
        logprobs = to_json(self._legacy_logprobs(delta)) if self._head.with_logprobs else "null"
        token_ids = f',"token_ids":{to_json(delta.token_ids)}' if self._head.return_token_ids else ""
        middle = (
            f'"text":{to_json(delta.content)},"logprobs":{logprobs},'
            f'"finish_reason":{to_json(delta.finish_reason)}{token_ids}'
        )
        return self._frame(delta.index, middle).encode()

    def _legacy_logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        return self._logprobs.setdefault(delta.index, LegacyLogprobs(self._tokenizer)).take(delta.logprobs)

    def _whole_choice(self, choice: Choice, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        entries = [entry for delta in deltas for entry in delta.logprobs]
        prompt_ids = {"prompt_token_ids": choice.prompt.token_ids.tolist()} if self._head.return_token_ids else {}
        return (
            {
                "index": choice.index,
                "text": (choice.prompt.text if self._echo else "") + "".join(delta.content for delta in deltas),
                "logprobs": LegacyLogprobs(self._tokenizer).take(entries) if self._head.with_logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            | _token_ids(self._head, deltas)
            | prompt_ids
        )


def _token_ids(head: AnswerHead, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
    if not head.return_token_ids:
        return {}
    return {"token_ids": [token_id for delta in deltas for token_id in delta.token_ids]}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object; the cached share is always told."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def error_fields(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_chunk(error: ApiError) -> bytes:
    """An error in the middle of a stream, when the status line has long been sent."""
    return f"data: {to_json(error_fields(error))}\n\n".encode()
