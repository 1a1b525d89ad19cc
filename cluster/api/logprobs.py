"""Owns the two shapes in which OpenAI's API shows log probabilities. Knows no sampling."""

from collections.abc import Sequence
from typing import Any

from warmstate.cluster.text.tokenizer import Tokenizer
from warmstate.replicas.messages import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say (vLLM's value)."""


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """The shape of chat completions: one object per token, with its bytes and its alternatives."""
    return {
        "content": [
            _token(entry.token_id, entry.logprob, tokenizer)
            | {"top_logprobs": [_token(token_id, logprob, tokenizer) for token_id, logprob in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, LOWEST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class LegacyLogprobs:
    """The shape of plain completions: parallel lists; `text_offset` goes on from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The lists for the next tokens."""
        tokens = [self._tokenizer.token_text(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(entry.logprob, LOWEST) for entry in entries],
            "tokens": tokens,
            "top_logprobs": [self._alternatives(entry) for entry in entries],
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        pairs = (*entry.top, (entry.token_id, entry.logprob))
        return {self._tokenizer.token_text(token_id): max(logprob, LOWEST) for token_id, logprob in pairs}
