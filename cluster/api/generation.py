"""Owns one request in flight: its choices, from replies to what is shown, and its usage. Knows no HTTP."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from warmstate.cluster.api.choice import Choice, ChoiceDelta
from warmstate.cluster.api.fan_in import FanIn
from warmstate.cluster.api.http_metrics import RequestTimer
from warmstate.cluster.errors import GenerationFailed
from warmstate.replicas.messages import FinishReason, TokenDelta


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int


class Generation:
    """Choices being generated. Must be closed; closing cancels whatever is not finished."""

    def __init__(self, choices: Sequence[Choice], choices_per_prompt: int, fan_in: FanIn, timer: RequestTimer) -> None:
        self.choices = tuple(choices)
        self._per_prompt = choices_per_prompt
        self._fan_in = fan_in
        self._timer = timer

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """What is new, all choices together; raises `GenerationFailed` or `ReplicaLost`."""
        async for batch in self._fan_in.batches():
            touched = dict.fromkeys(index for index, _ in batch)
            failure = await self._feed_all(batch)
            yield [shown for index in touched if (shown := self.choices[index].take()) is not None]
            if failure is not None:
                raise failure

    def usage(self) -> Usage:
        """What was used so far."""
        first_of_prompt = self.choices[:: self._per_prompt]
        return Usage(
            prompt_tokens=sum(len(choice.prompt.token_ids) for choice in first_of_prompt),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(choice.num_cached_tokens for choice in first_of_prompt),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
        )

    async def close(self) -> None:
        """Cancels what is not finished. May be called again."""
        await self._fan_in.close()

    async def _feed_all(self, batch: Sequence[tuple[int, TokenDelta]]) -> GenerationFailed | None:
        """Returns the failure that the batch holds, so that what came before it can still be shown."""
        for index, delta in batch:
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                return GenerationFailed(delta.error or "the replica gave the request up")
            await self._feed(self.choices[index], delta)
        return None

    async def _feed(self, choice: Choice, delta: TokenDelta) -> None:
        if choice.finish_reason is not None:
            return
        if delta.token_ids:
            self._timer.tokens_arrived(choice.index, len(delta.token_ids))
        choice.feed(delta)
        if choice.finish_reason is not None:
            self._count_finished(choice)
            if delta.finish_reason is None:
                await self._fan_in.close_one(choice.index)

    def _count_finished(self, choice: Choice) -> None:
        self._timer.choice_finished(choice.finish_reason or "")
        if choice.index % self._per_prompt == 0:
            self._timer.prompt_finished(len(choice.prompt.token_ids), choice.num_cached_tokens)
