"""The calls from the ingress to a replica through a Ray Serve handle, and what Ray raises on the way."""

import contextvars
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from warmstate.cluster.routing.router import RouteHint
from warmstate.cluster.routing.serve_client import CallBroken, ReplicaCall, RoutedReply
from warmstate.cluster.routing.stats_reader import StatsCall
from warmstate.replicas.messages import GenerateRequest

# Serve's default, cloudpickle, is for what no module defines, and slower.
_PICKLED = {"request_serialization": "pickle", "response_serialization": "pickle"}
_BROKEN = (RayError, RayServeException, grpc.aio.AioRpcError)


def serve_call(handle: Any) -> ReplicaCall:
    """The call that goes through a Serve deployment handle to `ReplicaDeployment.generate`."""
    method = handle.options(method_name="generate", stream=True, **_PICKLED)

    async def call(request: GenerateRequest, route: RouteHint) -> AsyncGenerator[RoutedReply, None]:
        # Calls made in the context of one HTTP request share its internal id, by which Serve's router tells apart those
        # that wait for a replica: of two at once it would lose one for ever. Outside it each gets an id of its own.
        response = contextvars.Context().run(method.remote, request, route=route)
        ended = False
        try:
            async for routed in response:
                yield routed
            ended = True
        except _BROKEN as error:
            raise CallBroken(f"{type(error).__name__}: {error}") from error
        finally:
            if not ended:
                response.cancel()

    return call


def serve_stats_call(handle: Any) -> StatsCall:
    """The call that goes through a Serve deployment handle to `ReplicaDeployment.stats` of one replica."""
    method = handle.options(method_name="stats", **_PICKLED)

    async def call(replica_id: str) -> Mapping[str, float] | None:
        response = contextvars.Context().run(method.remote, route=RouteHint(pinned=replica_id))
        ended = False
        try:
            sender, figures = await response
            ended = True
        except _BROKEN as error:
            raise CallBroken(f"{type(error).__name__}: {error}") from error
        finally:
            if not ended:
                response.cancel()
        return figures if sender == replica_id else None

    return call
