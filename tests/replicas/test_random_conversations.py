"""Replicas over a real server, with far too little room everywhere: conversations branch, replay their answers, and
lose what is stored at any moment, and every answer is the one of a replica that has no cache."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import chain_root
from warmstate.cache_store.redis_client import open_client
from warmstate.cache_store.store_keeper import KeeperLimits, StoreKeeper
from warmstate.replicas.cache.shared_store import SharedStore, store_endpoints
from warmstate.replicas.cache.state_codec import CheckpointNames
from warmstate.replicas.config import CacheConfig, StoreConfig
from warmstate.replicas.messages import CheckpointKind, GenerateRequest, Mark

Build = Callable[..., Any]

NAMESPACE = bytes(32)
SALTS = (b"", b"", b"one", b"two")
# An empty server takes 2.2 MB.
KEEPER = KeeperLimits(2_400_000, 0.85, 0.6)
MAX_TOKENS = 140
MAX_PROMPT_TOKENS = 1000


@dataclass(frozen=True)
class Turn:
    """What was said so far, and where its system block ends."""

    salt: bytes
    tokens: tuple[int, ...]
    system: int


class Fleet:
    """Replicas that come and go over one server."""

    def __init__(self, rng: random.Random, server: EmbeddedServer, sharing: Any) -> None:
        self._rng = rng
        self._server = server
        self._sharing = sharing
        self._num_joined = 0
        self.members: list[tuple[Any, SharedStore]] = []
        self.figures: Counter[str] = Counter()

    def join(self, fake_backend: Build, engine_over: Build) -> None:
        config = StoreConfig(
            self._server.url, self._server.password, operation_timeout_s=2.0, ttl_s=self._rng.choice([1, 60])
        )
        endpoints = store_endpoints(config)
        assert endpoints is not None
        backend = fake_backend(num_slots=3, num_blocks=self._rng.choice([20, 30, 60]))
        names = CheckpointNames(NAMESPACE, backend.shapes.num_head_groups)
        replica_id = f"replica-{self._num_joined}"
        self._num_joined += 1
        shared = SharedStore(endpoints, config, names, replica_id, time.time_ns(), self._sharing.loop, 1 << 20)
        asyncio.run_coroutine_threadsafe(shared.catch_up(), self._sharing.loop).result(10)
        engine = engine_over(
            backend,
            link=shared.link,
            listener=shared.directory.tell_local,
            cache=CacheConfig(self._rng.choice([6_000, 60_000, 1 << 22]), session_ttl_s=1),
            max_batch_tokens=self._rng.choice([64, 192, 512]),
        )
        self.members.append((engine, shared))

    def leave(self) -> None:
        engine, shared = self.members.pop(0)
        self.figures.update({**engine.stats(), **shared.stats()})
        asyncio.run_coroutine_threadsafe(shared.close(), self._sharing.loop).result(30)


class Talk:
    """Random requests that grow out of earlier ones, answers included."""

    def __init__(self, rng: random.Random, request_for: Build, prompt_of: Build) -> None:
        self._rng = rng
        self._request_for = request_for
        self._prompt_of = prompt_of
        self._turns: list[Turn] = []
        self._asked: dict[str, Turn] = {}

    def next_request(self) -> GenerateRequest:
        rng = self._rng
        said = self._prompt_of(rng.choice([1, 20, 64, 130, 300]), rng.randrange(3)).tolist()
        turn = rng.choice(self._turns) if self._turns and rng.random() < 0.75 else self._begin()
        if len(turn.tokens) + len(said) > MAX_PROMPT_TOKENS:
            turn = self._begin()
        turn = Turn(turn.salt, (*turn.tokens, *said), turn.system)
        request: GenerateRequest = self._request_for(
            turn.tokens,
            max_tokens=rng.choice([1, 5, 70, MAX_TOKENS]),
            marks=[
                Mark(CheckpointKind.SYSTEM, turn.system),
                Mark(CheckpointKind.TURN, len(turn.tokens) - rng.randrange(9)),
            ],
            chain_root=chain_root(turn.salt),
            temperature=0.8,
            seed=1,
        )
        self._asked[request.request_id] = turn
        return request

    def answered(self, request: GenerateRequest, said: list[int]) -> None:
        turn = self._asked.pop(request.request_id)
        self._turns.append(Turn(turn.salt, (*turn.tokens, *said), turn.system))

    def _begin(self) -> Turn:
        which = self._rng.randrange(3)
        system = tuple(self._prompt_of((300, 530, 64)[which], which).tolist())
        return Turn(self._rng.choice(SALTS), system, len(system))


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(8 << 20) as server:
        yield server


def lose_something(client: Any, rng: random.Random) -> None:
    """Everything, as of a server that was restarted, or some of the objects, as of one that evicts."""
    if rng.random() < 0.3:
        client.flushall()
    for name in sorted(client.keys("ws:{*.*.*}:*")):
        if rng.random() < 0.3:
            client.unlink(name)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_every_answer_is_exact_whatever_the_store_loses(
    fake_backend: Build,
    engine_over: Build,
    request_for: Build,
    prompt_of: Build,
    run_requests: Build,
    sharing: Any,
    server: EmbeddedServer,
    seed: int,
) -> None:
    rng = random.Random(seed)
    client = open_client(server.address, 1)
    keeper = StoreKeeper(server.address, server.address, "keeper", KEEPER, period_s=0.05)
    fleet, talk = Fleet(rng, server, sharing), Talk(rng, request_for, prompt_of)
    answers: list[tuple[GenerateRequest, list[int]]] = []
    for _ in range(60):
        while len(fleet.members) < 2:
            fleet.join(fake_backend, engine_over)
        engine, _ = rng.choice(fleet.members)
        requests = [talk.next_request() for _ in range(rng.randrange(1, 4))]
        results = run_requests(engine, requests)
        for request in requests:
            result = results[request.request_id]
            assert result.finish_reason == "length", result.error
            talk.answered(request, result.token_ids)
            answers.append((request, result.token_ids))
        chance = rng.random()
        if chance < 0.15:
            lose_something(client, rng)
        elif chance < 0.25:
            fleet.leave()
        elif chance < 0.3:
            time.sleep(0.6)
    while fleet.members:
        fleet.leave()
    rounds = keeper.stats()["rounds"]
    keeper.close()
    client.close()
    assert rounds > 10
    assert all(fleet.figures[f"restores_{source}"] for source in ("device", "host", "store"))
    assert fleet.figures["store_fetch_misses_absent"] > 0
    solo = engine_over(fake_backend(), cache=CacheConfig(0, enabled=False))
    for request, said in answers:
        assert said == run_requests(solo, [request])[request.request_id].token_ids
