"""Owns one choice's way from tokens to what is shown: text, reasoning, logprobs, why it ended. Knows no HTTP."""

from dataclasses import dataclass

from warmstate.cluster.api.prompt import PreparedPrompt
from warmstate.cluster.text.detokenizer import Detokenizer
from warmstate.cluster.text.reasoning import THINK_END, THINK_START, ReasoningSplitter, SplitText
from warmstate.cluster.text.stop_strings import StopStrings
from warmstate.cluster.text.tokenizer import Tokenizer
from warmstate.replicas.messages import FinishReason, TokenDelta, TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a request wants its output shown. `split_reasoning` is False for plain completions."""

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True
    split_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new of one choice. `token_ids` and `logprobs` are of the tokens taken in since the last delta."""

    index: int
    reasoning: str
    content: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None


class Choice:
    """Takes in one sequence's deltas token by token, so the outcome does not depend on how steps grouped them."""

    def __init__(self, index: int, prompt: PreparedPrompt, tokenizer: Tokenizer, options: OutputOptions) -> None:
        self.index = index
        self.prompt = prompt
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer, prompt.token_ids[-8:].tolist(), skip_special_tokens=options.skip_special_tokens
        )
        self._stops = StopStrings(options.stop, include_match=options.include_stop)
        self._think_ids = (tokenizer.token_id(THINK_START), tokenizer.token_id(THINK_END))
        thinks = options.split_reasoning and None not in self._think_ids
        self._splitter = ReasoningSplitter(starts_inside=prompt.starts_in_reasoning) if thinks else None
        self._is_reasoning = thinks and prompt.starts_in_reasoning
        self._reasoning = ""
        self._content = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def feed(self, delta: TokenDelta) -> None:
        """Takes in one delta; sets `finish_reason` when the choice is over, which a stop string can bring about."""
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        last = len(delta.token_ids) - 1
        for i, token_id in enumerate(delta.token_ids):
            if delta.logprobs:
                self._logprobs.append(delta.logprobs[i])
            self._feed_token(token_id, ends_it=i == last and delta.finish_reason is FinishReason.STOP)
            if self.finish_reason is not None:
                return
        if delta.finish_reason is not None:
            self._finish(delta.finish_reason)

    def take(self) -> ChoiceDelta | None:
        """What there is to show since the last call; None when all that came is still held back."""
        if not (self._content or self._reasoning or self.finish_reason):
            return None
        delta = ChoiceDelta(
            self.index,
            self._reasoning,
            self._content,
            tuple(self._token_ids),
            tuple(self._logprobs),
            self.finish_reason,
        )
        self._reasoning = self._content = ""
        self._token_ids.clear()
        self._logprobs.clear()
        return delta

    def _feed_token(self, token_id: int, *, ends_it: bool) -> None:
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if self._splitter is not None:
            self._count_reasoning(token_id)
        if ends_it and not self._options.include_stop:
            return
        text = self._detokenizer.feed(token_id)
        if self.num_tokens <= self._options.min_tokens:
            self._show(text)
        else:
            self._scan(text)

    def _scan(self, text: str) -> None:
        scan = self._stops.feed(text)
        self._show(scan.text)
        if scan.matched is not None:
            self._end(FinishReason.STOP)

    def _finish(self, reason: FinishReason) -> None:
        self._scan(self._detokenizer.flush())
        if self.finish_reason is None:
            self._show(self._stops.flush())
            self._end(reason)

    def _end(self, reason: FinishReason) -> None:
        if self._splitter is not None:
            self._append(self._splitter.flush())
        self.finish_reason = reason.value

    def _show(self, text: str) -> None:
        if text:
            self._append(SplitText(content=text) if self._splitter is None else self._splitter.feed(text))

    def _append(self, split: SplitText) -> None:
        self._reasoning += split.reasoning
        self._content += split.content

    def _count_reasoning(self, token_id: int) -> None:
        start, end = self._think_ids
        if token_id == end:
            self._is_reasoning = False
        elif self._is_reasoning:
            self.num_reasoning_tokens += 1
        elif token_id == start and self.num_tokens == 1:
            self._is_reasoning = True
