"""The call from the ingress to a replica through a Ray Serve handle, and what Ray raises on the way."""

import contextvars
from collections.abc import AsyncGenerator
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from warmstate.cluster.routing.router import RouteHint
from warmstate.cluster.routing.serve_client import CallBroken, ReplicaCall, RoutedReply
from warmstate.replicas.messages import GenerateRequest


def serve_call(handle: Any) -> ReplicaCall:
    """The call that goes through a Serve deployment handle to `ReplicaDeployment.generate`."""
    # Serve's default, cloudpickle, is for what no module defines, and slower.
    how = {"request_serialization": "pickle", "response_serialization": "pickle"}
    method = handle.options(method_name="generate", stream=True, **how)

    async def call(request: GenerateRequest, route: RouteHint) -> AsyncGenerator[RoutedReply, None]:
        # Calls made in the context of one HTTP request share its internal id, by which Serve's router tells apart those
        # that wait for a replica: of two at once it would lose one for ever. Outside it each gets an id of its own.
        response = contextvars.Context().run(method.remote, request, route=route)
        ended = False
        try:
            async for routed in response:
                yield routed
            ended = True
        except (RayError, RayServeException, grpc.aio.AioRpcError) as error:
            raise CallBroken(f"{type(error).__name__}: {error}") from error
        finally:
            if not ended:
                response.cancel()

    return call
