"""Owns what every HTTP request goes through first: its id, its API key, its body's limit. Knows no endpoint."""

import hmac
import re
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warmstate.cluster.api.responses import error_fields, to_json
from warmstate.cluster.errors import ApiError, BodyTooLarge, Unauthorized

PUBLIC_PATHS = frozenset({"/health", "/metrics", "/version"})

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

DEFAULT_RETRY_AFTER_S = 1


class RequestGuard:
    """ASGI middleware: gives each request an id, echoed in the response, and turns away unknown API keys.

    `api_keys` maps a tenant's name to its key; without any, everyone is the anonymous tenant. Sets
    `scope["state"]["request_id"]` and `["tenant"]`.
    """

    def __init__(self, app: ASGIApp, api_keys: Mapping[str, str]) -> None:
        self._app = app
        self._api_keys = {tenant: key.encode() for tenant, key in api_keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get(REQUEST_ID_HEADER))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        tenant = self._tenant(headers)
        if tenant is None and scope["path"] not in PUBLIC_PATHS:
            refused = Unauthorized(
                "A valid API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
            )
            await error_response(refused)(scope, receive, send_with_id)
            return
        scope.setdefault("state", {}).update(request_id=request_id, tenant=tenant or "")
        await self._app(scope, receive, send_with_id)

    def _tenant(self, headers: Headers) -> str | None:
        """Whose key came with the request; "" where none is asked for, None when it is not known."""
        if not self._api_keys:
            return ""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = (bearer if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode()
        # Every key is compared, in constant time, so that the time taken tells nothing.
        known = [tenant for tenant, key in self._api_keys.items() if hmac.compare_digest(key, offered)]
        return known[0] if known else None


def _request_id(offered: str | None) -> str:
    return offered if offered and _REQUEST_ID.fullmatch(offered) else uuid.uuid4().hex


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; raises `BodyTooLarge` as soon as it is known to be over the limit, whatever its length header."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is over the limit of {max_bytes} bytes", code="request_too_large")


def error_response(error: ApiError) -> Response:
    """The HTTP answer for an error, in OpenAI's shape."""
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(error.retry_after_s or DEFAULT_RETRY_AFTER_S)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(to_json(error_fields(error)), error.status, headers, media_type="application/json")
