"""Owns the routes of the OpenAI-compatible API. Knows no Ray: whatever hosts an ASGI application can host it."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from warmstate.cluster.api.answer import Answer
from warmstate.cluster.api.chat_service import ChatService, RequestContext
from warmstate.cluster.api.health import health_report
from warmstate.cluster.api.http_guard import REQUEST_ID_HEADER, RequestGuard, error_response, read_body
from warmstate.cluster.api.openai_api import ChatCompletionBody, CompletionBody, GenerationBody
from warmstate.cluster.api.replica_series import ReplicaStats, StatsSource
from warmstate.cluster.api.request_parsing import RequestParser
from warmstate.cluster.api.streaming import CLIENT_LEFT, ClientLeft, EventStream, while_connected
from warmstate.cluster.errors import ApiError, GenerationFailed, InvalidRequest, NotFound

REPLICA_HEADER = "x-warmstate-replica"

BodyT = TypeVar("BodyT", bound=GenerationBody)

Begin = Callable[[BodyT, RequestContext], Coroutine[Any, Any, Answer]]


async def no_stats() -> ReplicaStats:
    """The figures of no replica at all."""
    return {}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What the API lets in. `api_keys` maps a tenant's name to its key; empty means that nobody is asked for one."""

    max_body_bytes: int = 32 << 20
    api_keys: Mapping[str, str] = field(default_factory=dict)


def build_http_app(
    service: ChatService, limits: HttpLimits = HttpLimits(), replica_stats: StatsSource = no_stats
) -> Starlette:
    """The application; `replica_stats` is asked at each scrape of /metrics for figures to add."""
    routes = _Routes(service, limits, replica_stats)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{model_id:path}", routes.model),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/version", routes.version),
        ],
        middleware=[Middleware(RequestGuard, api_keys=limits.api_keys)],
        exception_handlers={
            ApiError: routes.api_error,
            HTTPException: routes.http_error,
            ClientLeft: _client_left,
            ClientDisconnect: _client_left,
            Exception: routes.unforeseen_error,
        },
    )


class _Routes:
    def __init__(self, service: ChatService, limits: HttpLimits, replica_stats: StatsSource) -> None:
        self._service = service
        self._limits = limits
        self._replica_stats = replica_stats
        self._parser = RequestParser()

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, ChatCompletionBody, self._service.chat)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, self._service.complete)

    async def _answer(self, request: Request, kind: type[BodyT], begin: Begin[BodyT]) -> Response:
        content = await read_body(request, self._limits.max_body_bytes)
        body = self._parser.parse(kind, content)
        started = begin(body, _context(request, len(content)))
        if body.stream:
            answer = await while_connected(request.receive, started)
            return EventStream(answer, _headers(answer.replica_ids))
        whole, headers = await while_connected(request.receive, _whole(started))
        return Response(whole, headers=headers, media_type="application/json")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        if model_id != self._service.card.served_name:
            raise NotFound(f"The model {model_id[:200]!r} does not exist", param="model", code="model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        card = self._service.card
        return {
            "id": card.served_name,
            "object": "model",
            "created": card.created,
            "owned_by": "warmstate",
            "root": card.served_name,
            "parent": None,
            "max_model_len": card.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        report = health_report(await self._service.phases())
        headers = None if report.is_ready else {"retry-after": "1"}
        return JSONResponse(report.fields(), 200 if report.is_ready else 503, headers)

    async def metrics(self, request: Request) -> Response:
        text = self._service.metrics.text(await self._replica_stats())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": version("warmstate")})

    async def api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self._service.metrics.count_error(error.status)
        response = error_response(error)
        response.headers.update(_headers(error.replica_ids))
        return response

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Routing's own errors, in OpenAI's shape."""
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path[:200]}"
        kind = NotFound if error.status_code == 404 else InvalidRequest
        self._service.metrics.count_error(error.status_code)
        response = error_response(kind(f"{where}: {error.detail}"))
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response

    async def unforeseen_error(self, request: Request, error: Exception) -> Response:
        """A bug of ours: the server logs the traceback, the client learns only that it was not its fault."""
        self._service.metrics.count_error(500)
        response = error_response(GenerationFailed("internal error; the server's log has the details"))
        # This handler runs outside the guard, which would have set it.
        response.headers[REQUEST_ID_HEADER] = request.state.request_id
        return response


async def _whole(started: Coroutine[Any, Any, Answer]) -> tuple[bytes, dict[str, str]]:
    answer = await started
    try:
        return await answer.whole(), _headers(answer.replica_ids)
    except ApiError as error:
        error.replica_ids = answer.replica_ids
        raise


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


def _context(request: Request, body_bytes: int) -> RequestContext:
    return RequestContext(
        request_id=request.state.request_id,
        tenant=request.state.tenant,
        replica_id=request.headers.get(REPLICA_HEADER) or None,
        body_bytes=body_bytes,
    )


def _headers(replica_ids: Sequence[str]) -> dict[str, str]:
    return {REPLICA_HEADER: ",".join(replica_ids)} if replica_ids else {}
