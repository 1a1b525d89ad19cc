"""The engine's thread: it sleeps, wakes, ends, and never leaves anybody waiting."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from warmstate.replicas.engine_thread import EngineThread
from warmstate.replicas.errors import InvalidRequest, PromptTooLong, QueueFull
from warmstate.replicas.messages import FinishReason

Build = Callable[..., Any]


def engine_thread(engine: Any, max_queue: int = 8, **options: Any) -> EngineThread:
    return EngineThread(engine, max_queue, 1, asyncio.get_running_loop(), **options)


def test_closing_during_the_last_step_ends_the_thread(
    fake_backend: Build, engine_over: Build, request_for: Build, prompt_of: Build
) -> None:
    """The next step takes the stop from the inbox and finds nothing to run: that must not be a reason to sleep."""
    entered, leave = threading.Event(), threading.Event()

    class Slow(fake_backend):  # type: ignore[misc, valid-type]
        def forward(self, plan: Any, tokens: Any) -> Any:
            entered.set()
            leave.wait(10)
            return super().forward(plan, tokens)

    async def scenario() -> None:
        thread = engine_thread(engine_over(Slow()))
        thread.submit(request_for(prompt_of(20), max_tokens=1))
        await asyncio.to_thread(entered.wait, 10)
        closing = asyncio.create_task(thread.close())
        await asyncio.sleep(0.05)
        leave.set()
        done, _ = await asyncio.wait([closing], timeout=10)
        assert done, "the thread sleeps on"

    asyncio.run(scenario())


def test_closing_ends_open_streams_with_an_error(
    fake_backend: Build, engine_over: Build, request_for: Build, prompt_of: Build
) -> None:
    async def scenario() -> None:
        thread = engine_thread(engine_over(fake_backend(max_model_len=4000)))
        stream = thread.submit(request_for(prompt_of(20), max_tokens=3900))
        assert (await stream.get()).token_ids
        await thread.close()
        last = await stream.get()
        while last.finish_reason is None:
            last = await stream.get()
        assert last.finish_reason is FinishReason.ERROR

    asyncio.run(scenario())


def test_an_engine_bug_ends_every_stream_and_is_told(
    fake_backend: Build, engine_over: Build, request_for: Build, prompt_of: Build
) -> None:
    class Buggy(fake_backend):  # type: ignore[misc, valid-type]
        def forward(self, plan: Any, tokens: Any) -> Any:
            raise AssertionError("a bug")

    async def scenario() -> None:
        died = asyncio.Event()
        thread = engine_thread(engine_over(Buggy()), on_death=died.set)
        stream = thread.submit(request_for(prompt_of(20)))
        assert (await asyncio.wait_for(stream.get(), 10)).finish_reason is FinishReason.ERROR
        await asyncio.wait_for(died.wait(), 10)
        await thread.close()

    seen: list[Any] = []
    before, threading.excepthook = threading.excepthook, seen.append
    try:
        asyncio.run(scenario())
    finally:
        threading.excepthook = before
    assert [str(caught.exc_value) for caught in seen] == ["a bug"]


def test_an_id_in_use_is_refused_and_harms_nobody(
    fake_backend: Build, engine_over: Build, request_for: Build, prompt_of: Build
) -> None:
    async def scenario() -> None:
        thread = engine_thread(engine_over(fake_backend(max_model_len=4000)))
        request = request_for(prompt_of(20), max_tokens=300)
        stream = thread.submit(request)
        with pytest.raises(InvalidRequest, match=request.request_id):
            thread.submit(request)
        last = await asyncio.wait_for(stream.get(), 10)
        while last.finish_reason is None:
            last = await asyncio.wait_for(stream.get(), 10)
        assert last.finish_reason is FinishReason.LENGTH
        thread.submit(request)
        thread.cancel(request.request_id)
        again = thread.submit(request)
        assert (await asyncio.wait_for(again.get(), 10)).token_ids
        await thread.close()

    asyncio.run(scenario())


def test_refusals_are_immediate(fake_backend: Build, engine_over: Build, request_for: Build, prompt_of: Build) -> None:
    async def scenario() -> None:
        thread = engine_thread(engine_over(fake_backend(max_model_len=100)), max_queue=0)
        with pytest.raises(PromptTooLong):
            thread.submit(request_for(prompt_of(100)))
        with pytest.raises(QueueFull, match="at most 0") as refused:
            thread.submit(request_for(prompt_of(10)))
        assert refused.value.retry_after_s == 1
        await thread.close()

    asyncio.run(scenario())
