"""Owns what `/health` says: whether requests can be answered, and how far start-up has got."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from warmstate.replicas.messages import ReplicaPhase

_ORDER = ("failed", "loading", "warming", "ready")


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The most advanced replica speaks for the application: one that is ready is enough."""

    foremost: ReplicaPhase
    replicas: Mapping[str, ReplicaPhase]

    @property
    def is_ready(self) -> bool:
        return self.foremost.phase == "ready"

    def fields(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {
            "status": "ok" if self.is_ready else "unavailable",
            **asdict(self.foremost),
            "replicas": {replica_id: asdict(phase) for replica_id, phase in sorted(self.replicas.items())},
        }


def health_report(phases: Mapping[str, ReplicaPhase]) -> HealthReport:
    """Sums up the replicas' phases; no replica known means that loading has not begun."""
    if not phases:
        return HealthReport(ReplicaPhase("loading", 0.0, "no replica has reported yet"), phases)
    foremost = max(phases.values(), key=lambda phase: (_ORDER.index(phase.phase), phase.fraction))
    return HealthReport(foremost, phases)
