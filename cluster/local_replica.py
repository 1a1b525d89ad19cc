"""One replica in this process as a `ReplicaClient`: the whole path of a chat without Ray."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from warmstate.replicas.messages import GenerateRequest, Refused, ReplicaPhase, Reply
from warmstate.replicas.service import ReplicaService


class LocalReplica:
    """The `ReplicaClient` of tests and of programs that embed one replica. The service stays its owner's to close."""

    def __init__(self, service: ReplicaService, replica_id: str) -> None:
        self._service = service
        self._replica_id = replica_id

    async def generate(self, request: GenerateRequest, replica_id: str | None = None) -> AsyncGenerator[Reply, None]:
        """Hands on what the replica says; a pin to any other replica is `Refused` with 404."""
        if replica_id not in (None, self._replica_id):
            yield Refused(404, f"no replica {replica_id!r}; the only one is {self._replica_id!r}")
            return
        async with aclosing(self._service.generate(request)) as replies:
            async for reply in replies:
                yield reply

    async def phases(self) -> dict[str, ReplicaPhase]:
        return {self._replica_id: self._service.phase}
