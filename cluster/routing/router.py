"""Chooses the replica for a request: the longest usable prefix first, then the least busy. Knows no HTTP."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_LEAD = 8
"""A replica this many requests busier than the idlest is not worth its prefix: its queue costs more than a prefill."""


@dataclass(frozen=True, slots=True)
class RouteHint:
    """What the ingress knows about one request. Travels as the keyword argument `route` of the replica's methods.

    `depths` are usable prefix tokens by replica id; `store_depth` is what any replica can fetch. `pinned` is the one
    replica that may answer. `avoided` have refused or lost this request before.
    """

    depths: Mapping[str, int] = field(default_factory=dict)
    store_depth: int = 0
    pinned: str | None = None
    avoided: frozenset[str] = frozenset()


def rank_replicas(hint: RouteHint, loads: Mapping[str, int], rng: random.Random) -> list[str]:
    """Replica ids of `loads` (requests in flight by replica id), best first.

    A pin that is not among them is ranked like any other request: whoever gets it answers that it is unknown.
    """
    if hint.pinned is not None and hint.pinned in loads:
        return [hint.pinned]
    idlest = min(loads.values(), default=0)

    def cost(replica_id: str) -> tuple[bool, int, int, int, float]:
        local = hint.depths.get(replica_id, 0) if loads[replica_id] - idlest < MAX_LEAD else 0
        usable = max(local, hint.store_depth)
        return replica_id in hint.avoided, -usable, loads[replica_id], -local, rng.random()

    return sorted(loads, key=cost)


class RoutingTable:
    """The replicas that Serve routes to, and how many requests this process has in flight to each."""

    def __init__(self) -> None:
        self._loads: dict[str, int] = {}

    @property
    def loads(self) -> Mapping[str, int]:
        return self._loads

    def set_replicas(self, replica_ids: Sequence[str]) -> None:
        self._loads = {replica_id: self._loads.get(replica_id, 0) for replica_id in replica_ids}

    def drop_replica(self, replica_id: str) -> None:
        self._loads.pop(replica_id, None)

    def start_request(self, replica_id: str) -> None:
        if replica_id in self._loads:
            self._loads[replica_id] += 1

    def end_request(self, replica_id: str) -> None:
        if self._loads.get(replica_id, 0) > 0:
            self._loads[replica_id] -= 1


table = RoutingTable()
"""This process's one table: Serve makes the router itself, out of reach of the ingress, so they meet here."""
