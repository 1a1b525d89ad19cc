"""Sends requests to the replica deployment and keeps them alive when a replica is lost. Knows no HTTP and no text."""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from warmstate.cache_store.keys import split_keys
from warmstate.cache_store.prefix_index import STORE_HOLDER, PrefixIndex
from warmstate.cluster.errors import ClusterError
from warmstate.cluster.routing.journey import Journey
from warmstate.cluster.routing.replica_view import ReplicaView
from warmstate.cluster.routing.router import RouteHint
from warmstate.replicas.messages import GenerateRequest, ReplicaPhase, Reply

logger = logging.getLogger(__name__)

RoutedReply = tuple[str, Reply]
"""What a replica's `generate` yields: its own id, and the reply."""

ReplicaCall = Callable[[GenerateRequest, RouteHint], AsyncGenerator[RoutedReply, None]]
"""Starts one call through the router; closing the generator cancels it. Raises `CallBroken`."""


class CallBroken(ClusterError):
    """The replica died, or the way to it broke, before its last reply."""


class ServeReplicaClient:
    """The `ReplicaClient` over a Serve deployment. One request is sent at most `max_attempts` times."""

    def __init__(self, call: ReplicaCall, view: ReplicaView, index: PrefixIndex, max_attempts: int) -> None:
        self._call = call
        self.view = view
        """Replaced by a richer one when the store is found."""
        self._index = index
        self._max_attempts = max_attempts

    async def phases(self) -> dict[str, ReplicaPhase]:
        return self.view.phases()

    async def generate(self, request: GenerateRequest, replica_id: str | None = None) -> AsyncGenerator[Reply, None]:
        """A request that no replica has answered yet is sent elsewhere unseen; a stream that broke off goes on
        elsewhere from the tokens it has yielded (seeded sampling counts them, so the rest is the same)."""
        journey = Journey(request)
        for _ in range(self._max_attempts):
            if journey.has_all_tokens or not set(self.view.ready()) - journey.avoided:
                break
            async with aclosing(self._attempt(journey, replica_id)) as replies:
                async for reply in replies:
                    yield reply
            if journey.ended:
                return
        yield journey.give_up()

    async def _attempt(self, journey: Journey, pinned: str | None) -> AsyncGenerator[Reply, None]:
        """Yields what one replica says and the client has not heard; returns early when it refuses or is lost."""
        rest = journey.next_request()
        hint = self._hint(rest, pinned, journey.avoided)
        sender: str | None = None
        try:
            async with aclosing(self._call(rest, hint)) as replies:
                async for sender, reply in replies:
                    for shown in journey.advance(sender, reply, may_retry=pinned is None):
                        yield shown
        except CallBroken as error:
            logger.warning("request %s lost replica %s: %s", rest.request_id, sender or "(unknown)", error)
        if sender is not None and not journey.ended:
            journey.avoided.add(sender)

    def _hint(self, request: GenerateRequest, pinned: str | None, avoided: set[str]) -> RouteHint:
        depths = self._index.deepest(split_keys(request.prompt_keys))
        return RouteHint(depths, depths.get(STORE_HOLDER, 0), pinned, frozenset(avoided))
