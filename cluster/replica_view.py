"""What the ingress knows of the replicas without asking them. Never waits for a replica."""

from collections.abc import Sequence
from typing import Protocol

from warmstate.replicas.messages import ReplicaPhase


class ReplicaView(Protocol):
    """Implementations: `store_view.StoreView` (rows that replicas write) and `RoutedView` (no store)."""

    def ready(self) -> Sequence[str]:
        """Ids of the replicas that take requests."""
        ...

    def phases(self) -> dict[str, ReplicaPhase]:
        """Start-up phase of every replica known, by id."""
        ...

    def stats(self) -> dict[str, dict[str, float]]:
        """Latest statistics of every replica known, by id."""
        ...
