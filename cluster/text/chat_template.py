"""Owns messages to prompt: the checkpoint's Jinja template, and which positions of the prompt other prompts will share.

Knows no HTTP and no sampling. Rendering is Hugging Face's own, in its sandbox.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from warmstate.cluster.errors import InvalidRequest
from warmstate.cluster.text.reasoning import THINK_END, THINK_START
from warmstate.cluster.text.render_memo import RenderMemo
from warmstate.cluster.text.template_file import REFUSALS, read_template
from warmstate.cluster.text.tokenizer import EncodedText, TokenIds, Tokenizer
from warmstate.replicas.messages import CheckpointKind, Mark

Message = Mapping[str, Any]

# Differs from any text a user is likely to begin with, and survives the `trim` of templates.
_OTHER_USER = {"role": "user", "content": "\x01"}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a request may change about rendering; `extra` is the request's chat_template_kwargs.

    `hinted` are the indices of the messages after which the client wants a checkpoint, and `hints_tools` says that it
    wants one after the tools.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    extra: Mapping[str, Any] | None = None
    hinted: frozenset[int] = frozenset()
    hints_tools: bool = False


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt in tokens. `marks` are positions worth a checkpoint, ascending, each at an added token such as
    `<|im_start|>`: tokenisation never reaches across those, so other prompts share exactly the tokens before."""

    token_ids: TokenIds
    marks: tuple[Mark, ...]
    starts_in_reasoning: bool


class ChatTemplate:
    """Renders conversations of one model. Thread-safe."""

    def __init__(self, source: str, tokenizer: Tokenizer, special_tokens: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._beginnings = RenderMemo()
        self._endings = RenderMemo()
        self._knows_thinking = all(tokenizer.token_id(tag) is not None for tag in (THINK_START, THINK_END))

    @classmethod
    def from_directory(cls, path: Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Raises `MissingFile` without a template, and `CheckpointError` for one that does not compile."""
        source, special_tokens = read_template(path)
        return cls(source, tokenizer, special_tokens)

    def render(self, messages: Sequence[Message], options: ChatOptions) -> RenderedPrompt:
        """Renders and tokenises, once; raises `InvalidRequest` with the template's own words when it refuses."""
        messages = self._known_roles(messages)
        text = self._render_text(messages, options)
        encoded = self._tokenizer.encode(text)
        turn_start = self._turn_start(text, messages, options)
        chars = [(CheckpointKind.TURN, turn_start), *self._shared_with_others(text, messages, options)]
        marks = {Mark(kind, self._mark(encoded, char)) for kind, char in chars if char is not None}
        opened = text[turn_start or 0 :]
        return RenderedPrompt(
            encoded.token_ids,
            tuple(sorted((mark for mark in marks if mark.position), key=lambda mark: (mark.position, mark.kind))),
            self._knows_thinking and opened.rfind(THINK_START) > opened.rfind(THINK_END),
        )

    def _known_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        """OpenAI's newer name for system, where the template does not know it."""
        if "developer" in self._source:
            return messages
        return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]

    def _turn_start(self, text: str, messages: Sequence[Message], options: ChatOptions) -> int | None:
        """Where the last turn's generation prompt (or the message to be continued) begins.

        A generation prompt once found is looked for at the end of later conversations, which saves their second
        rendering.
        """
        without = ChatOptions(options.tools, False, False, options.extra)
        if options.continue_final_message:
            return _divergence(text, self._try_render(messages[:-1], without))
        if options.add_generation_prompt:
            sources = [messages[-1]["role"], options.extra]
            ending = self._endings.get(sources, lambda: _ending(text, self._try_render(messages, without)))
            if ending is not None and text.endswith(ending):
                return len(text) - len(ending)
        return _divergence(text, self._try_render(messages, without))

    def _shared_with_others(
        self, text: str, messages: Sequence[Message], options: ChatOptions
    ) -> Iterator[tuple[CheckpointKind, int | None]]:
        """What another conversation with the same system and tools shares; where tool results are being answered,
        what is left of this one when the user speaks next (templates rewrite the thinking before); and what the client
        says is shared. System and tools are one block."""
        others = ChatOptions(options.tools, False, False, options.extra)
        leading = (i for i, m in enumerate(messages) if m["role"] not in ("system", "developer"))
        num_system = next(leading, len(messages))
        beginning = [*messages[:num_system], _OTHER_USER]
        sources = [beginning, options.tools, options.extra]
        system = _divergence(text, self._beginnings.get(sources, lambda: self._try_render(beginning, others)))
        yield CheckpointKind.SYSTEM, system
        if options.hints_tools:
            yield CheckpointKind.HINT, system
        if messages[-1]["role"] == "tool":
            yield CheckpointKind.LOOP, _divergence(text, self._try_render([*messages, _OTHER_USER], others))
        for index in sorted(options.hinted):
            hinted = self._try_render([*messages[: index + 1], _OTHER_USER], others)
            yield CheckpointKind.HINT, _divergence(text, hinted)

    def _try_render(self, messages: Sequence[Message], options: ChatOptions) -> str | None:
        """The text; None when there is nothing to render or the template refuses it."""
        if not messages:
            return None
        try:
            return self._render_text(messages, options)
        except InvalidRequest:
            return None

    def _mark(self, encoded: EncodedText, char: int) -> int:
        """The last added token that begins at or before `char`; 0 when there is none."""
        index = encoded.token_at(char)
        while index > 0 and int(encoded.token_ids[index]) not in self._tokenizer.added_ids:
            index -= 1
        return index

    def _render_text(self, messages: Sequence[Message], options: ChatOptions) -> str:
        try:
            texts, _ = render_jinja_template(
                conversations=[list(messages)],
                tools=list(options.tools) if options.tools else None,
                chat_template=self._source,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **{**self._special_tokens, **(options.extra or {})},
            )
        except REFUSALS as error:
            raise InvalidRequest(f"messages: the chat template refused them: {error}", param="messages") from error
        return str(texts[0])


def _divergence(text: str, other: str | None) -> int | None:
    """Where `text` and another rendering go apart; None without one.

    Where both go on, differently, it is the last character they share: what follows decides about its token.
    """
    if other is None:
        return None
    shared = shared_length(text, other)
    return shared if shared == len(other) else max(shared - 1, 0)


def _ending(text: str, other: str | None) -> str | None:
    """What `text` has beyond `other`; None where it is no more than that, or something else."""
    return text[len(other) :] if other is not None and len(other) < len(text) and text.startswith(other) else None


def shared_length(first: str, second: str) -> int:
    """Length of the common beginning of two texts, by bisection over whole-slice comparisons."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
