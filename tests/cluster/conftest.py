"""A replica that says what the test wrote down, the demo tokenizer and template, and a real HTTP server around them."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn
from starlette.types import ASGIApp

from warmstate.cluster.api.chat_service import ChatService
from warmstate.cluster.api.http_app import build_http_app
from warmstate.cluster.local_replica import LocalReplica
from warmstate.cluster.model_card import ModelCard, read_model_card
from warmstate.cluster.text.chat_template import ChatTemplate
from warmstate.cluster.text.tokenizer import Tokenizer
from warmstate.models.demo.demo_chat_template import CHAT_TEMPLATE
from warmstate.models.demo.demo_tokenizer import END_OF_TURN, build_tokenizer
from warmstate.replicas.config import CacheConfig, EngineConfig, ReplicaConfig
from warmstate.replicas.messages import (
    Accepted,
    FinishReason,
    GenerateRequest,
    ReplicaPhase,
    Reply,
    TokenDelta,
    TokenLogprobs,
)
from warmstate.replicas.service import ReplicaService

MAX_MODEL_LEN = 512


class Hang:
    """A step of a script at which the replica says nothing more, for ever."""


Step = Reply | Hang | Exception


class ScriptedReplica:
    """A `ReplicaClient` whose replies are written down. Remembers what it was asked, and how many replies are open."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        """Forgets what was asked, and says hello to everyone again."""
        self.requests: list[GenerateRequest] = []
        self.pins: list[str | None] = []
        self.num_open = 0
        self.phase_of: dict[str, ReplicaPhase] = {"r1": ReplicaPhase("ready", 1.0)}
        self.script: Callable[[GenerateRequest], Sequence[Step]] = lambda _: self.saying("Hello!")

    def saying(
        self,
        text: str,
        *,
        finish: FinishReason | None = FinishReason.STOP,
        per_step: int = 1,
        cached: int = 0,
        logprobs: bool = False,
    ) -> list[Step]:
        """Steps of a reply with this text, `per_step` tokens at a time, an end-of-turn token last when it stops."""
        ids = self.tokenizer.encode(text).token_ids.tolist()
        if finish is FinishReason.STOP:
            ids.append(self.tokenizer.token_id(END_OF_TURN))
        steps: list[Step] = [Accepted("r1")]
        for at in range(0, len(ids), per_step):
            piece = tuple(ids[at : at + per_step])
            entries = tuple(TokenLogprobs(i, -0.5, ((i, -0.5), (65, float("-inf")))) for i in piece)
            is_last = at + per_step >= len(ids)
            steps.append(
                TokenDelta(
                    piece,
                    entries if logprobs else (),
                    finish_reason=finish if is_last else None,
                    num_cached_tokens=cached if at == 0 else None,
                )
            )
        return steps

    async def generate(self, request: GenerateRequest, replica_id: str | None = None) -> AsyncGenerator[Reply, None]:
        self.requests.append(request)
        self.pins.append(replica_id)
        self.num_open += 1
        try:
            for step in self.script(request):
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, Hang):
                    await asyncio.Event().wait()
                else:
                    yield step
        finally:
            self.num_open -= 1

    async def phases(self) -> dict[str, ReplicaPhase]:
        return self.phase_of


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer())


@pytest.fixture(scope="session")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(CHAT_TEMPLATE, tokenizer)


@pytest.fixture(scope="session")
def card(tokenizer: Tokenizer) -> ModelCard:
    return ModelCard("demo", MAX_MODEL_LEN, tokenizer.vocab_size, frozenset({258}), created=1_700_000_000)


@pytest.fixture(scope="session")
def session_replica(tokenizer: Tokenizer) -> ScriptedReplica:
    return ScriptedReplica(tokenizer)


@pytest.fixture
def replica(session_replica: ScriptedReplica) -> ScriptedReplica:
    session_replica.reset()
    return session_replica


@pytest.fixture
def hang() -> Hang:
    return Hang()


@pytest.fixture(scope="session")
def service(
    session_replica: ScriptedReplica, card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate
) -> Iterator[ChatService]:
    service = ChatService(session_replica, card, tokenizer, template, b"secret")
    yield service
    service.close()


class _Server(uvicorn.Server):
    """Tells other threads when it takes connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_up.set()


@contextmanager
def _running(app: ASGIApp) -> Iterator[str]:
    """Serves `app` on a free port of the loopback interface; yields its URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", ws="none", lifespan="off")
    server = _Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server.is_up.wait(20), "the test server did not start"
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def serve(service: ChatService) -> Iterator[Callable[..., str]]:
    """Serves the HTTP API with the arguments given to `build_http_app`; returns its URL."""
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(_running(build_http_app(service, *args, **more)))


@pytest.fixture(scope="session")
def url(service: ChatService) -> Iterator[str]:
    """The HTTP API with default limits, one server for all tests."""
    with _running(build_http_app(service)) as url:
        yield url


@pytest.fixture(scope="session")
def session_http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
def http(session_http: httpx.Client, replica: ScriptedReplica) -> httpx.Client:
    """A client of the API, in front of a replica that has forgotten everything."""
    return session_http


@asynccontextmanager
async def _api(checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    engine = EngineConfig(max_model_len=2048, max_batch_tokens=256, max_sequences=4, kv_tokens=8192)
    config = ReplicaConfig(
        checkpoint, torch.float32, True, 1, engine, CacheConfig(host_bytes=64 << 20, fetch_policy="always")
    )
    replica = ReplicaService(config, "only")
    card = read_model_card(checkpoint, "demo", engine.max_model_len)
    service = ChatService.from_checkpoint(LocalReplica(replica, "only"), card, checkpoint, b"secret")
    transport = httpx.ASGITransport(build_http_app(service))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            loading = await client.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}]}
            )
            assert (loading.status_code, loading.headers["retry-after"]) == (503, "1")
            assert (await client.get("/health")).status_code == 503
            await replica.start()
            yield client
    finally:
        service.close()
        await replica.close()


@pytest.fixture(scope="session")
def with_local_replica() -> Callable[[Path, Callable[[httpx.AsyncClient], Awaitable[None]]], None]:
    """Runs what is given with a client of the HTTP API over one real replica of a checkpoint, without Ray."""

    def run(checkpoint: Path, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        async def main() -> None:
            async with _api(checkpoint) as client:
                await work(client)

        asyncio.run(asyncio.wait_for(main(), 120))

    return run
