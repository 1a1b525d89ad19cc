"""Deltas between the engine's thread and their reader: joined, in order, none lost to a timer or a cancelled wait."""

import asyncio

import pytest

from warmstate.replicas.delta_stream import DeltaStream
from warmstate.replicas.messages import FinishReason, TokenDelta


async def test_what_nobody_has_read_yet_comes_as_one() -> None:
    stream = DeltaStream()
    stream.put(TokenDelta((1,), num_cached_tokens=64, cache_source="host"))
    stream.put(TokenDelta((2, 3), finish_reason=FinishReason.STOP))
    expected = TokenDelta((1, 2, 3), (), FinishReason.STOP, 64, "host")
    assert await stream.get() == expected


async def test_a_reader_that_waits_is_woken() -> None:
    stream = DeltaStream()
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    stream.put(TokenDelta((7,)))
    assert (await reader).token_ids == (7,)


async def test_a_limit_that_passes_loses_nothing() -> None:
    stream = DeltaStream()
    assert await stream.get_within(0.001) is None
    stream.put(TokenDelta((7,)))
    assert (await stream.get()).token_ids == (7,)


async def test_a_delta_that_comes_with_the_end_of_the_limit_is_read_once() -> None:
    stream = DeltaStream()
    reader = asyncio.create_task(stream.get_within(0))
    stream.put(TokenDelta((7,)))
    first = await reader
    assert first is not None
    assert first.token_ids == (7,)
    assert await stream.get_within(0) is None


async def test_a_reader_that_gives_up_leaves_what_comes_to_the_next() -> None:
    stream = DeltaStream()
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.put(TokenDelta((7,)))
    assert (await stream.get()).token_ids == (7,)
