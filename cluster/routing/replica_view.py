"""What the ingress knows of the replicas without asking them. Never waits for a replica."""

from collections.abc import Collection, Mapping
from typing import Protocol

from warmstate.cluster.routing.router import RoutingTable
from warmstate.replicas.messages import ReplicaPhase

_SOMEONE = "replica"
"""Stands for the replicas of which nothing is known yet."""


class ReplicaView(Protocol):
    """Implementations: `RoutedView` (no store) and `store_view.StoreView` (the rows that replicas write)."""

    def ready(self) -> Collection[str]:
        """Ids of the replicas that take requests."""
        ...

    def phases(self) -> dict[str, ReplicaPhase]:
        """Start-up phase of every replica known, by id; never empty."""
        ...


class RoutedView:
    """What Serve alone tells: who is ready. Without a store nobody says how far the others are."""

    def __init__(self, table: RoutingTable) -> None:
        self._table = table

    def ready(self) -> Collection[str]:
        return self._table.loads.keys()

    def phases(self) -> dict[str, ReplicaPhase]:
        return with_ready({}, self.ready())


def with_ready(told: Mapping[str, ReplicaPhase], ready: Collection[str]) -> dict[str, ReplicaPhase]:
    """The phases that replicas told, set right by Serve, which alone decides who takes requests."""
    phases = {
        replica_id: ReplicaPhase("warming", phase.fraction, phase.detail) if phase.phase == "ready" else phase
        for replica_id, phase in told.items()
    }
    phases.update({replica_id: ReplicaPhase("ready", 1.0) for replica_id in ready})
    return phases or {_SOMEONE: ReplicaPhase("loading", 0.0, "no replica has begun to load yet")}
