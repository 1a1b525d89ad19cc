"""Owns turning a request body into prompts: tokens, prefix keys, marks. Knows no replica and no response."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warmstate.cache_store.keys import chain_root, prefix_keys
from warmstate.cluster.api.cache_hints import is_hinted, without_hints
from warmstate.cluster.api.openai_api import ChatCompletionBody, CompletionBody, Prompt
from warmstate.cluster.errors import InvalidRequest
from warmstate.cluster.model_card import ModelCard
from warmstate.cluster.text.chat_template import ChatOptions, ChatTemplate
from warmstate.cluster.text.tokenizer import TokenIds, Tokenizer
from warmstate.replicas.messages import CheckpointKind, Mark


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, ready to be sent; `text` is what `echo` repeats."""

    token_ids: TokenIds
    chain_root: bytes
    prompt_keys: bytes
    marks: tuple[Mark, ...] = ()
    starts_in_reasoning: bool = False
    text: str = ""


class PromptPreparer:
    """The part of a request that costs time before any replica is asked; runs in a thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, card: ModelCard) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._card = card

    def chat(self, body: ChatCompletionBody, salt: bytes) -> PreparedPrompt:
        """Renders, tokenises and hashes a conversation."""
        continued = bool(body.continue_final_message)
        options = ChatOptions(
            tools=without_hints(body.tools),
            add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continued,
            extra=body.chat_template_kwargs,
            hinted=frozenset(i for i, message in enumerate(body.messages) if message.num_hints),
            hints_tools=any(map(is_hinted, body.tools or ())),
        )
        rendered = self._template.render([message.for_template() for message in body.messages], options)
        self._check_not_empty(rendered.token_ids, "messages")
        root, keys = _keys(rendered.token_ids, salt)
        return PreparedPrompt(rendered.token_ids, root, keys, rendered.marks, rendered.starts_in_reasoning)

    def completions(self, body: CompletionBody, salt: bytes) -> list[PreparedPrompt]:
        """Tokenises and hashes plain prompts; those given as token ids are taken as they are."""
        return [self._completion(prompt, salt, bool(body.echo), body.cache_hints or ()) for prompt in body.prompt]

    def _completion(self, prompt: Prompt, salt: bytes, echo: bool, hints: Sequence[int]) -> PreparedPrompt:
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=True).token_ids
        else:
            token_ids = self._checked_ids(prompt)
        self._check_not_empty(token_ids, "prompt")
        if hints and max(hints) > len(token_ids):
            raise InvalidRequest(
                f"cache_hints: {max(hints)} is beyond the end of a prompt of {len(token_ids)} tokens",
                param="cache_hints",
            )
        root, keys = _keys(token_ids, salt)
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(token_ids) if echo else ""
        marks = tuple(Mark(CheckpointKind.HINT, position) for position in hints)
        return PreparedPrompt(token_ids, root, keys, marks, text=text)

    def _checked_ids(self, prompt: list[int]) -> TokenIds:
        for extreme in (min(prompt), max(prompt)):
            if not 0 <= extreme < self._card.vocab_size:
                raise InvalidRequest(
                    f"prompt: {extreme} is not a token id; they go from 0 to {self._card.vocab_size - 1}",
                    param="prompt",
                )
        return np.asarray(prompt, dtype=np.int32)

    def _check_not_empty(self, token_ids: TokenIds, field: str) -> None:
        if len(token_ids) == 0:
            raise InvalidRequest(f"{field}: no token is left after tokenising; at least one is needed", param=field)


def _keys(token_ids: TokenIds, salt: bytes) -> tuple[bytes, bytes]:
    root = chain_root(salt)
    return root, b"".join(prefix_keys(token_ids.view(np.uint32), root))
