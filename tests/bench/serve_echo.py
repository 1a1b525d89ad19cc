"""The floor that HTTP figures are compared with: a bare two-hop Ray Serve application that streams prepared chunks.

Two deployments and a handle stream, as in `cluster.app`, and nothing else: no validation, template, tokenizer, engine.
"""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle

CHUNK = b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
http = FastAPI()


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.001}, max_ongoing_requests=64)
class EchoEngine:
    """Yields the asked-for number of tokens without computing anything."""

    async def generate(self, num_tokens: int) -> AsyncGenerator[int, None]:
        for token in range(num_tokens):
            yield token


@serve.deployment(ray_actor_options={"num_cpus": 0.001}, max_ongoing_requests=256)
@serve.ingress(http)
class EchoIngress:
    """Turns the engine's tokens into server-sent events, or counts them."""

    def __init__(self, engine: DeploymentHandle[Any]) -> None:
        self._engine = engine.options(stream=True)

    @http.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        body = await request.json()
        tokens = self._engine.generate.remote(body["max_tokens"])
        if not body.get("stream"):
            return JSONResponse({"usage": {"completion_tokens": len([token async for token in tokens])}})

        async def events() -> AsyncGenerator[bytes, None]:
            async for _ in tokens:
                yield CHUNK
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


def build(_: dict[str, Any]) -> serve.Application:
    """The echo application."""
    return EchoIngress.bind(EchoEngine.bind())  # type: ignore[attr-defined]  # ray is not typed
