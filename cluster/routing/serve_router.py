"""The hook through which Ray Serve asks `router` where to send a request. Runs on the ingress's event loop."""

import random

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# Serve pickles this module by value, objects that it names included; the table is shared only by way of its module.
from warmstate.cluster.routing import router as routing


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # ray is not typed
    """The Serve hook. It reads memory only: the loop it runs on also carries every stream."""

    def initialize_state(self) -> None:
        self._rng = random.Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        hint = routing.RouteHint()
        if pending_request is not None:
            # Without it Serve spins at full speed while every replica is full.
            pending_request.routing_context.should_backoff = True
            hint = pending_request.kwargs.get("route", hint)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {replica_id: routing.table.loads.get(replica_id, 0) for replica_id in by_id}
        # One replica per rank: within a rank Serve would choose by queue length alone.
        return [[by_id[replica_id]] for replica_id in routing.rank_replicas(hint, loads, self._rng)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        routing.table.set_replicas([replica.replica_id.unique_id for replica in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        routing.table.drop_replica(replica_id.unique_id)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        routing.table.start_request(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        routing.table.end_request(replica_id.unique_id)
