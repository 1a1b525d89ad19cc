"""The HTTP API as a deployment: wires the app to the replicas' handle, the router's index and the store. No routes."""

import asyncio
from dataclasses import replace
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warmstate.cache_store.prefix_index import PrefixIndex
from warmstate.cluster.api.chat_service import ChatService
from warmstate.cluster.api.http_app import HttpLimits, build_http_app
from warmstate.cluster.api.http_guard import REQUEST_ID_HEADER
from warmstate.cluster.config import AppConfig
from warmstate.cluster.launch.logs import set_up_logging
from warmstate.cluster.launch.loopback import stay_on_loopback
from warmstate.cluster.launch.process_heap import freeze_heap
from warmstate.cluster.model_card import ModelCard
from warmstate.cluster.routing import router as routing
from warmstate.cluster.routing.replica_view import RoutedView
from warmstate.cluster.routing.serve_call import serve_call, serve_stats_call
from warmstate.cluster.routing.serve_client import ServeReplicaClient
from warmstate.cluster.routing.stats_reader import StatsReader
from warmstate.cluster.routing.store_view import StoreView
from warmstate.replicas.cache.shared_store import store_endpoints
from warmstate.replicas.config import ReplicaConfig


class WithoutRequestId:
    """ASGI middleware: takes the request id off the response, because Serve appends the same one whatever is there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[REQUEST_ID_HEADER]
            await send(message)

        await self._app(scope, receive, send_without_id)


@serve.ingress()
class IngressDeployment:
    """Answers from its first moment: until a replica is ready with 503 and how far they are."""

    # Serve awaits a constructor that is a coroutine.
    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, card: ModelCard, replica: ReplicaConfig, replicas: Any, store: Any | None
    ) -> None:
        stay_on_loopback()
        set_up_logging(config.log_level, "ingress")
        self._http = config.http
        self._store_config = replica.store
        self._index = PrefixIndex(config.router.index_entries)
        self._client = ServeReplicaClient(
            serve_call(replicas), RoutedView(routing.table), self._index, config.router.max_attempts
        )
        # Asked of the replicas themselves: a store that is away, or not there, must not hide how they are.
        self._stats = StatsReader(serve_stats_call(replicas), lambda: routing.table.loads.keys())
        self._service = ChatService.from_checkpoint(self._client, card, replica.model_path, config.cache_secret())
        self._store_view: StoreView | None = None
        self._store_search = asyncio.create_task(self._find_store(store))
        freeze_heap()

    def __serve_build_asgi_app__(self) -> Starlette:
        """Serve's hook for an app that exists only once the constructor has run."""
        keys = {tenant: key.get_secret_value() for tenant, key in self._http.api_keys.items()}
        limits = HttpLimits(int(self._http.max_body_bytes), keys)
        app = build_http_app(self._service, limits, self._stats.read)
        app.add_middleware(WithoutRequestId)
        return app

    async def _find_store(self, store: Any | None) -> None:
        """The embedded store may start later than we do, and no request waits for it."""
        config = self._store_config
        url, password = (config.url, config.password) if store is None else await store.address.remote()
        endpoints = store_endpoints(replace(config, url=url, password=password))
        if endpoints is None:
            return
        self._store_view = StoreView(endpoints.index, routing.table, self._index)
        self._client.view = self._store_view

    async def __del__(self) -> None:
        """Serve awaits this when it takes the deployment down."""
        if not hasattr(self, "_store_search"):
            return
        self._store_search.cancel()
        self._stats.close()
        if self._store_view is not None:
            await asyncio.to_thread(self._store_view.close)
        self._service.close()
