"""The seam between the HTTP API and the replicas. Knows no HTTP, no text and no Ray."""

from collections.abc import AsyncGenerator
from typing import Protocol

from warmstate.replicas.messages import GenerateRequest, ReplicaPhase, Reply


class ReplicaClient(Protocol):
    """Sends a request to the replica that suits it best. Implementations: `LocalReplica` (one replica in this process,
    the test double) and `serve_client.ServeReplicaClient` (a Ray Serve deployment behind the router)."""

    def generate(self, request: GenerateRequest, replica_id: str | None = None) -> AsyncGenerator[Reply, None]:
        """Yields one `Accepted` and then deltas, or one `Refused`. Closing the generator cancels the request.

        `replica_id` pins the request to one replica (a debugging aid); an unknown one is `Refused` with 404.
        """
        ...

    async def phases(self) -> dict[str, ReplicaPhase]:
        """Start-up phase of every replica known, by replica id; never waits for a replica to start."""
        ...
