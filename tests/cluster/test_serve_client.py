"""The client's promises, over scripted replicas: the call is a value here, so no Ray is needed."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import pytest

from warmstate.cache_store.keys import chain_root, prefix_keys, split_keys
from warmstate.cache_store.prefix_index import STORE_HOLDER, IndexRow, PrefixIndex
from warmstate.cluster.routing.router import RouteHint
from warmstate.cluster.routing.serve_client import CallBroken, RoutedReply, ServeReplicaClient
from warmstate.replicas.messages import (
    Accepted,
    FinishReason,
    GenerateRequest,
    Refused,
    ReplicaPhase,
    Reply,
    SamplingParams,
    TokenDelta,
)

Script = Sequence[Reply | Exception]


def request(num_tokens: int = 130, max_tokens: int = 4) -> GenerateRequest:
    tokens = np.arange(num_tokens, dtype=np.int32)
    keys = prefix_keys(tokens.astype(np.uint32), chain_root())
    return GenerateRequest("r", tokens, SamplingParams(max_tokens, seed=1), chain_root(), b"".join(keys))


class Replicas:
    """A fleet with a script per replica; the first ready one that is not avoided is called, as the router would."""

    def __init__(self, scripts: dict[str, Script]) -> None:
        self.scripts = scripts
        self.calls: list[tuple[str, GenerateRequest, RouteHint]] = []
        self.num_closed = 0

    def ready(self) -> list[str]:
        return list(self.scripts)

    def phases(self) -> dict[str, ReplicaPhase]:
        return {name: ReplicaPhase("ready", 1.0) for name in self.scripts}

    async def call(self, asked: GenerateRequest, route: RouteHint) -> AsyncGenerator[RoutedReply, None]:
        name = next(name for name in self.scripts if name not in route.avoided)
        self.calls.append((name, asked, route))
        try:
            for reply in self.scripts[name]:
                if isinstance(reply, Exception):
                    raise reply
                await asyncio.sleep(0)
                yield name, reply
        finally:
            self.num_closed += 1


def ask(replicas: Replicas, asked: GenerateRequest | None = None, pin: str | None = None) -> list[Reply]:
    async def collect() -> list[Reply]:
        client = ServeReplicaClient(replicas.call, replicas, PrefixIndex(), max_attempts=4)
        return [reply async for reply in client.generate(asked or request(), pin)]

    return asyncio.run(collect())


DONE = TokenDelta((9,), finish_reason=FinishReason.STOP)


def test_a_reply_passes_through_unchanged() -> None:
    script: list[Reply] = [Accepted("a"), TokenDelta((5,), num_cached_tokens=64), DONE]
    assert ask(Replicas({"a": script})) == script


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_replica_is_not_the_last_word(status: int) -> None:
    replicas = Replicas({"a": [Refused(status, "busy", 1)], "b": [Accepted("b"), DONE]})
    assert ask(replicas) == [Accepted("b"), DONE]
    assert replicas.calls[1][2].avoided == {"a"}


def test_when_all_are_busy_the_client_hears_it_once() -> None:
    replicas = Replicas({"a": [Refused(429, "full a", 1)], "b": [Refused(429, "full b", 2)]})
    assert ask(replicas) == [Refused(429, "full b", 2)]


def test_a_refusal_of_the_request_itself_is_not_tried_elsewhere() -> None:
    replicas = Replicas({"a": [Refused(400, "too long")], "b": [Accepted("b"), DONE]})
    assert ask(replicas) == [Refused(400, "too long")]


def test_a_pinned_request_is_not_tried_elsewhere() -> None:
    replicas = Replicas({"a": [Refused(429, "full", 1)], "b": [Accepted("b"), DONE]})
    assert ask(replicas, pin="a") == [Refused(429, "full", 1)]


def test_nobody_ready_is_said_at_once() -> None:
    (reply,) = ask(Replicas({}))
    assert isinstance(reply, Refused)
    assert (reply.status, reply.retry_after_s) == (503, 1)


def test_a_death_before_the_first_token_is_not_seen() -> None:
    replicas = Replicas({"a": [Accepted("a"), CallBroken("killed")], "b": [Accepted("b"), DONE]})
    assert ask(replicas) == [Accepted("a"), DONE]
    first, second = (asked for _, asked, _ in replicas.calls)
    assert dataclasses.replace(second, request_id=first.request_id) == first


def test_no_replica_sees_an_id_twice() -> None:
    """A replica that cannot be reached may still be at work when the router comes back to it."""
    replicas = Replicas({"a": [CallBroken("unreachable")]})
    ask(replicas)
    ids = [asked.request_id for _, asked, _ in replicas.calls]
    assert len(ids) == len(set(ids)) == 4


def test_a_stream_goes_on_from_the_tokens_it_has_yielded() -> None:
    replicas = Replicas(
        {
            "a": [Accepted("a"), TokenDelta((5, 6), num_cached_tokens=64), TokenDelta((7,)), CallBroken("killed")],
            "b": [Accepted("b"), TokenDelta((8,), finish_reason=FinishReason.LENGTH, num_cached_tokens=128)],
        }
    )
    assert ask(replicas) == [
        Accepted("a"),
        TokenDelta((5, 6), num_cached_tokens=64),
        TokenDelta((7,)),
        TokenDelta((8,), finish_reason=FinishReason.LENGTH),
    ]
    rest = replicas.calls[1][1]
    assert rest.token_ids.tolist() == [*range(130), 5, 6, 7]
    assert (rest.sampling.max_tokens, rest.num_output_tokens, rest.sampling.seed) == (1, 3, 1)


def test_the_keys_of_a_continuation_cover_the_yielded_tokens() -> None:
    asked = request(num_tokens=190, max_tokens=80)
    replicas = Replicas(
        {"a": [Accepted("a"), TokenDelta(tuple(range(70))), CallBroken("killed")], "b": [Accepted("b"), DONE]}
    )
    ask(replicas, asked)
    rest = replicas.calls[1][1]
    assert rest.prompt_keys == b"".join(prefix_keys(rest.token_ids.astype(np.uint32), chain_root()))
    assert len(rest.prompt_keys) == 32 * (260 // 64)


def test_a_stream_lost_after_its_last_token_is_complete() -> None:
    replicas = Replicas({"a": [Accepted("a"), TokenDelta((1, 2, 3, 4)), CallBroken("killed")], "b": []})
    assert ask(replicas)[-1] == TokenDelta((), finish_reason=FinishReason.LENGTH)
    assert len(replicas.calls) == 1


def test_a_stream_that_nobody_can_finish_ends_with_an_error() -> None:
    replicas = Replicas({"a": [Accepted("a"), TokenDelta((1,)), CallBroken("killed")], "b": [Refused(429, "full", 1)]})
    last = ask(replicas)[-1]
    assert isinstance(last, TokenDelta)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert "full" in last.error


def test_the_number_of_attempts_is_bounded() -> None:
    replicas = Replicas({name: [CallBroken("killed")] for name in "abcdefgh"})
    (reply,) = ask(replicas)
    assert isinstance(reply, Refused)
    assert len(replicas.calls) == 4


def test_closing_the_stream_closes_the_call() -> None:
    replicas = Replicas({"a": [Accepted("a"), TokenDelta((1,)), TokenDelta((2,)), DONE]})

    async def leave_early() -> None:
        stream = ServeReplicaClient(replicas.call, replicas, PrefixIndex(), 4).generate(request())
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave_early())
    assert replicas.num_closed == 1


def test_the_router_is_told_what_the_index_knows() -> None:
    replicas = Replicas({"a": [Accepted("a"), DONE]})
    index = PrefixIndex()
    first, second = split_keys(request().prompt_keys)
    index.insert(first, "a", IndexRow(64, "host"))
    index.insert(second, STORE_HOLDER, IndexRow(128, "store"))

    async def run() -> None:
        async for _ in ServeReplicaClient(replicas.call, replicas, index, 4).generate(request(), "a"):
            pass

    asyncio.run(run())
    assert replicas.calls[0][2] == RouteHint({"a": 64, "store": 128}, store_depth=128, pinned="a")


def test_a_reply_that_begins_with_a_delta_was_accepted_by_its_sender() -> None:
    replicas = Replicas({"a": [TokenDelta((5,), num_cached_tokens=64), DONE]})
    assert ask(replicas) == [Accepted("a"), TokenDelta((5,), num_cached_tokens=64), DONE]


def test_a_stream_that_goes_on_elsewhere_is_accepted_only_once() -> None:
    replicas = Replicas({"a": [TokenDelta((5,)), CallBroken("killed")], "b": [TokenDelta((6,)), DONE]})
    replies = ask(replicas)
    assert [reply for reply in replies if isinstance(reply, Accepted)] == [Accepted("a")]
    assert [reply.token_ids for reply in replies if isinstance(reply, TokenDelta)] == [(5,), (6,), DONE.token_ids]
