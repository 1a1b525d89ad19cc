"""Owns splitting `<think>...</think>` output into reasoning and content. Knows no tokens and no HTTP."""

from dataclasses import dataclass
from enum import Enum, auto

from warmstate.cluster.text.stop_strings import longest_partial

THINK_START = "<think>"
THINK_END = "</think>"


@dataclass(frozen=True, slots=True)
class SplitText:
    """A piece of output, apart; either may be ""."""

    reasoning: str = ""
    content: str = ""


class _State(Enum):
    BEGINNING = auto()
    REASONING = auto()
    AFTER_REASONING = auto()
    CONTENT = auto()


class ReasoningSplitter:
    """Splits text that comes in pieces. The tags and the newlines around them belong to neither side.

    `starts_inside`: the prompt has opened the think block. Otherwise reasoning begins only where the output itself
    begins with `<think>`; a tag further on is content, and so is everything after the first `</think>`.
    """

    def __init__(self, *, starts_inside: bool) -> None:
        self._state = _State.REASONING if starts_inside else _State.BEGINNING
        self._held = ""
        self._reasoning_begun = False

    def feed(self, text: str) -> SplitText:
        """Splits more text, holding back only what could belong to a tag or to the newlines around it."""
        self._held += text
        reasoning = ""
        if self._state is _State.BEGINNING:
            self._leave_beginning()
        if self._state is _State.REASONING:
            reasoning = self._take_reasoning()
        if self._state is _State.AFTER_REASONING:
            self._held = self._held.lstrip("\n")
            self._state = _State.CONTENT if self._held else _State.AFTER_REASONING
        return SplitText(reasoning, self._take_all() if self._state is _State.CONTENT else "")

    def flush(self) -> SplitText:
        """What was held back, once no more can come: an unfinished tag is text after all."""
        held = self._take_all()
        if self._state is _State.REASONING:
            return SplitText(reasoning=held.rstrip("\n"))
        return SplitText(content=held)

    def _take_all(self) -> str:
        held, self._held = self._held, ""
        return held

    def _leave_beginning(self) -> None:
        visible = self._held.lstrip()
        if visible.startswith(THINK_START):
            self._held = visible[len(THINK_START) :]
            self._state = _State.REASONING
        elif not THINK_START.startswith(visible):
            self._state = _State.CONTENT

    def _take_reasoning(self) -> str:
        if not self._reasoning_begun:
            self._held = self._held.lstrip("\n")
            self._reasoning_begun = bool(self._held)
        before, tag, after = self._held.partition(THINK_END)
        if tag:
            self._held = after
            self._state = _State.AFTER_REASONING
            return before.rstrip("\n")
        shown = before[: len(before) - longest_partial(before, THINK_END)].rstrip("\n")
        self._held = before[len(shown) :]
        return shown
