"""Several reply streams read as one: opened together, batched, closed at once."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from warmstate.cluster.api.fan_in import FanIn
from warmstate.cluster.errors import GenerationFailed, Overloaded, ReplicaLost
from warmstate.replicas.messages import Accepted, FinishReason, Refused, Reply, TokenDelta


class Stream:
    """A reply stream that notes when it is closed; None in its script waits for ever."""

    def __init__(self, *steps: Reply | Exception | None) -> None:
        self.steps = steps
        self.is_closed = False

    async def replies(self) -> AsyncGenerator[Reply, None]:
        try:
            for step in self.steps:
                if step is None:
                    await asyncio.Event().wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.is_closed = True


def _token(token_id: int, *, last: bool = False) -> TokenDelta:
    return TokenDelta((token_id,), finish_reason=FinishReason.STOP if last else None)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


async def _read_all(*streams: Stream) -> list[tuple[int, int]]:
    fan_in = FanIn([stream.replies() for stream in streams])
    await fan_in.open()
    try:
        return [(i, delta.token_ids[0]) async for batch in fan_in.batches() for i, delta in batch]
    finally:
        await fan_in.close()


def test_every_delta_arrives_once_and_in_order_within_its_stream() -> None:
    streams = [Stream(Accepted("a"), *[_token(k) for k in range(50)], _token(50, last=True)) for _ in range(3)]
    read = _run(_read_all(*streams))
    assert [[k for i, k in read if i == j] for j in range(3)] == [list(range(51))] * 3
    assert all(stream.is_closed for stream in streams)


def test_what_arrived_meanwhile_is_one_batch() -> None:
    async def read() -> list[int]:
        fan_in = FanIn([Stream(Accepted("a"), *[_token(k) for k in range(5)], _token(5, last=True)).replies()])
        await fan_in.open()
        await asyncio.sleep(0.01)
        return [len(batch) async for batch in fan_in.batches()]

    assert _run(read()) == [6]


def test_opening_tells_the_replicas_in_order_and_waits_for_the_slowest() -> None:
    async def late() -> AsyncGenerator[Reply, None]:
        await asyncio.sleep(0.01)
        yield Accepted("late")
        yield _token(1, last=True)

    async def opened() -> list[str]:
        fan_in = FanIn([late(), Stream(Accepted("early"), _token(1), None).replies()])
        replica_ids = await fan_in.open()
        await fan_in.close()
        return replica_ids

    assert _run(opened()) == ["late", "early"]


def test_one_refusal_closes_every_stream() -> None:
    waiting, accepted = Stream(None), Stream(Accepted("a"), _token(1), None)
    with pytest.raises(Overloaded) as raised:
        _run(_read_all(waiting, accepted, Stream(Refused(429, "full", 7))))
    assert raised.value.retry_after_s == 7
    assert waiting.is_closed
    assert accepted.is_closed


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([], ReplicaLost),
        ([Accepted("a")], ReplicaLost),
        ([Accepted("a"), _token(1)], ReplicaLost),
        ([ReplicaLost("gone")], ReplicaLost),
        ([Accepted("a"), ValueError("a bug")], GenerationFailed),
        ([_token(1), _token(2, last=True)], ReplicaLost),
    ],
)
def test_a_stream_that_does_not_end_well_is_an_error_even_beside_one_that_waits(
    steps: list[Any], error: type[Exception]
) -> None:
    waiting = Stream(Accepted("b"), _token(1), None)
    with pytest.raises(error):
        _run(_read_all(Stream(*steps), waiting))
    assert waiting.is_closed


def test_closing_one_stream_leaves_the_others() -> None:
    async def read() -> list[tuple[int, int]]:
        hanging, other = Stream(Accepted("a"), _token(1), None), Stream(Accepted("b"), _token(1), _token(2, last=True))
        fan_in = FanIn([hanging.replies(), other.replies()])
        await fan_in.open()
        await fan_in.close_one(0)
        assert hanging.is_closed
        return [(i, delta.token_ids[0]) async for batch in fan_in.batches() for i, delta in batch if i == 1]

    assert _run(read()) == [(1, 1), (1, 2)]


def test_cancelling_the_reader_closes_the_streams() -> None:
    async def cancelled() -> bool:
        stream = Stream(None)
        fan_in = FanIn([stream.replies()])
        opening = asyncio.ensure_future(fan_in.open())
        await asyncio.sleep(0.01)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        return stream.is_closed

    assert _run(cancelled())
