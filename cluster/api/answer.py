"""Owns one accepted request's answer: a generation and the builder that puts it into words. Knows no HTTP."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from warmstate.cluster.api.choice import ChoiceDelta
from warmstate.cluster.api.generation import Generation
from warmstate.cluster.api.responses import DONE, ResponseBuilder, error_chunk
from warmstate.cluster.errors import ApiError


class Answer:
    """An answer that has begun: `replica_ids` say where. Must be closed."""

    def __init__(
        self, generation: Generation, builder: ResponseBuilder, replica_ids: list[str], *, include_usage: bool
    ) -> None:
        self.replica_ids = tuple(dict.fromkeys(replica_ids))
        self._generation = generation
        self._builder = builder
        self._include_usage = include_usage

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; whatever is available at once leaves as one piece. A failure becomes an error event."""
        if first := self._builder.first_chunks(self._generation.choices):
            yield first
        try:
            async with aclosing(self._generation.deltas()) as batches:
                async for batch in batches:
                    if batch:
                        yield b"".join(self._builder.chunk(delta) for delta in batch)
        except ApiError as error:
            yield error_chunk(error) + DONE
            return
        yield (self._builder.usage_chunk(self._generation.usage()) if self._include_usage else b"") + DONE

    async def whole(self) -> bytes:
        """The JSON of the whole answer; raises `ApiError` when the generation fails."""
        deltas: list[ChoiceDelta] = []
        try:
            async with aclosing(self._generation.deltas()) as batches:
                async for batch in batches:
                    deltas += batch
        finally:
            await self.close()
        return self._builder.whole(self._generation.choices, deltas, self._generation.usage())

    async def close(self) -> None:
        """Cancels what is not finished. May be called again."""
        await self._generation.close()
