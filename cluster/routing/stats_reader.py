"""Owns the latest figures of the ready replicas, asked of each by itself. Knows no Serve and no store."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from warmstate.cluster.routing.serve_client import CallBroken

logger = logging.getLogger(__name__)

AGE = "figures_age_s"
"""The figure, added to each replica's own, that says how old they are, in seconds."""

StatsCall = Callable[[str], Awaitable[Mapping[str, float] | None]]
"""Asks one replica by its id; None when another one answered. Raises `CallBroken`."""

_FRESH_S = 1.0
_WAIT_S = 0.3
_GIVE_UP_S = 5.0


@dataclass(slots=True)
class _Known:
    """What a replica told last, and when; before its first answer nothing, and when it was first asked."""

    told_at_s: float
    figures: Mapping[str, float] = field(default_factory=dict)
    has_told: bool = False
    question: asyncio.Task[None] | None = None


class StatsReader:
    """Asks when it is read. A replica that is late is not waited for: its last figures stand, with their age, and what
    it answers later is there for the next reading. `call` asks one replica, `ready` names those that can be asked."""

    def __init__(self, call: StatsCall, ready: Callable[[], Collection[str]]) -> None:
        self._call = call
        self._ready = ready
        self._known: dict[str, _Known] = {}

    async def read(self) -> dict[str, dict[str, float]]:
        """The figures of every ready replica, by its id, within about 0.3 s."""
        ids, now = set(self._ready()), time.monotonic()
        for gone in self._known.keys() - ids:
            self._forget(gone)
        for replica_id in ids:
            self._ask_if_due(replica_id, now)
        if questions := [known.question for known in self._known.values() if known.question is not None]:
            await asyncio.wait(questions, timeout=_WAIT_S)
        now = time.monotonic()
        return {replica_id: {**known.figures, AGE: now - known.told_at_s} for replica_id, known in self._known.items()}

    def close(self) -> None:
        for replica_id in list(self._known):
            self._forget(replica_id)

    def _ask_if_due(self, replica_id: str, now: float) -> None:
        known = self._known.setdefault(replica_id, _Known(now))
        if known.question is None and not (known.has_told and now - known.told_at_s < _FRESH_S):
            known.question = asyncio.create_task(self._ask(replica_id, known))

    async def _ask(self, replica_id: str, known: _Known) -> None:
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                figures = await self._call(replica_id)
        except (TimeoutError, CallBroken) as error:
            logger.debug("replica %s does not tell its figures: %s", replica_id, error or "no answer in time")
        else:
            if figures is not None:
                known.figures, known.told_at_s, known.has_told = figures, time.monotonic(), True
        finally:
            known.question = None

    def _forget(self, replica_id: str) -> None:
        question = self._known.pop(replica_id).question
        if question is not None:
            question.cancel()
