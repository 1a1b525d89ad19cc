"""One replica as a deployment: `ReplicaService` behind a Serve handle. Knows no HTTP and no model."""

import dataclasses
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve

from warmstate.cache_store.errors import CacheStoreError
from warmstate.cluster.launch.logs import LogLevel, set_up_logging
from warmstate.cluster.launch.loopback import stay_on_loopback
from warmstate.cluster.launch.process_heap import freeze_heap, keep_freed_memory
from warmstate.cluster.launch.strict_products import ask_for_strict_products
from warmstate.cluster.routing.router import RouteHint
from warmstate.cluster.routing.serve_client import RoutedReply
from warmstate.models.checkpoints.loading import Progress
from warmstate.models.checkpoints.preflight import CheckpointSummary
from warmstate.models.errors import ModelError
from warmstate.replicas.config import ReplicaConfig
from warmstate.replicas.errors import NotReady, ReplicaError
from warmstate.replicas.executor import Executor, InProcessExecutor
from warmstate.replicas.messages import GenerateRequest, Refused
from warmstate.replicas.service import ReplicaService

logger = logging.getLogger(__name__)

# Long enough for a short prompt's first token, and too short for anyone to miss the headers of the response.
_ACCEPT_AFTER_S = 0.1


class ReplicaDeployment:
    """Loads while it is constructed: Serve routes no request to a replica whose constructor has not returned."""

    # Serve awaits a constructor that is a coroutine.
    async def __init__(  # type: ignore[misc]
        self, config: ReplicaConfig, store: Any | None, log_level: LogLevel
    ) -> None:
        stay_on_loopback()
        self._replica_id: str = serve.get_replica_context().replica_id.unique_id
        set_up_logging(log_level, f"replica {self._replica_id}")
        started = time.monotonic()
        keep_freed_memory()
        ask_for_strict_products()
        if store is not None:
            url, password = await store.address.remote()
            config = dataclasses.replace(config, store=dataclasses.replace(config.store, url=url, password=password))
        self._service = ReplicaService(config, self._replica_id, self.load_executor)
        try:
            await self._service.start()
        except (ModelError, ReplicaError, CacheStoreError) as error:
            logger.error("cannot start: %s", error)
            raise
        logger.info(
            "ready after %.1f s; its checkpoints are shared under namespace %s",
            time.monotonic() - started,
            self._service.namespace.hex()[:16],
        )
        freeze_heap()

    async def generate(self, request: GenerateRequest, route: RouteHint) -> AsyncGenerator[RoutedReply, None]:
        """The replies of `ReplicaService.generate`, each with this replica's id. Closing cancels the request.

        A reply whose first item is a delta was accepted: each item is a message, and one is saved.
        """
        if route.pinned not in (None, self._replica_id):
            yield self._replica_id, Refused(404, f"replica {route.pinned} does not exist; this is {self._replica_id}")
            return
        replies = self._service.generate(request, _ACCEPT_AFTER_S)
        try:
            async for reply in replies:
                yield self._replica_id, reply
        finally:
            await replies.aclose()

    def load_executor(self, config: ReplicaConfig, summary: CheckpointSummary, progress: Progress) -> Executor:
        """Brings up the ranks, blocking; a deployment of another kind of ranks is a subclass."""
        return InProcessExecutor.load(config, summary, progress)

    async def stats(self, route: RouteHint) -> tuple[str, dict[str, float]]:
        """This replica's id and figures; whom `route` pins may be gone, and another one be asked."""
        return self._replica_id, self._service.stats()

    def check_health(self) -> None:
        """Raises when Serve must replace this replica."""
        if self._service.phase.phase == "failed":
            raise NotReady(self._service.phase.detail)

    async def __del__(self) -> None:
        """Serve awaits this when it takes the replica down."""
        if hasattr(self, "_service"):
            await self._service.close()
