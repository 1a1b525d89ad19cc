"""How the figures of replicas are gathered, over replicas that answer, hang or are gone."""

import asyncio
import time
from collections.abc import Mapping

from warmstate.cluster.routing.serve_client import CallBroken
from warmstate.cluster.routing.stats_reader import AGE, StatsReader


class Fleet:
    """Each replica tells how often it was asked; `hanging` ones answer only when let go, `broken` ones fail."""

    def __init__(self, *ids: str) -> None:
        self.ids = list(ids)
        self.num_asked = dict.fromkeys(ids, 0)
        self.hanging: dict[str, asyncio.Event] = {}
        self.broken: set[str] = set()
        self.elsewhere: set[str] = set()
        self.num_cancelled = 0
        self.reader = StatsReader(self.ask, lambda: self.ids)

    async def ask(self, replica_id: str) -> Mapping[str, float] | None:
        self.num_asked[replica_id] += 1
        if replica_id in self.broken:
            raise CallBroken("it died")
        if replica_id in self.hanging:
            try:
                await self.hanging[replica_id].wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        return None if replica_id in self.elsewhere else {"asked": float(self.num_asked[replica_id])}


async def test_every_replica_tells_its_own_and_how_old_it_is() -> None:
    fleet = Fleet("a", "b")
    read = await fleet.reader.read()
    assert {replica_id: figures["asked"] for replica_id, figures in read.items()} == {"a": 1, "b": 1}
    assert all(0 <= figures[AGE] < 0.2 for figures in read.values())


async def test_within_a_second_nobody_is_asked_twice() -> None:
    fleet = Fleet("a")
    await asyncio.gather(*(fleet.reader.read() for _ in range(5)))
    await fleet.reader.read()
    assert fleet.num_asked == {"a": 1}
    await asyncio.sleep(1.05)
    assert (await fleet.reader.read())["a"]["asked"] == 2


async def test_who_hangs_or_is_dead_hides_nobody_and_holds_up_nobody() -> None:
    fleet = Fleet("a", "hung", "dead")
    await fleet.reader.read()
    fleet.hanging["hung"] = asyncio.Event()
    fleet.broken.add("dead")
    await asyncio.sleep(1.05)
    began = time.monotonic()
    first = await fleet.reader.read()
    assert 0.25 < time.monotonic() - began < 0.5
    assert {replica_id: figures["asked"] for replica_id, figures in first.items()} == {"a": 2, "hung": 1, "dead": 1}
    assert first["a"][AGE] < 0.5
    assert first["hung"][AGE] > 1
    assert first["dead"][AGE] > 1
    # While it has not answered it is not asked again.
    await fleet.reader.read()
    assert fleet.num_asked["hung"] == 2
    fleet.hanging.pop("hung").set()
    await asyncio.sleep(0)
    assert (await fleet.reader.read())["hung"]["asked"] == 2


async def test_a_replica_that_has_never_told_shows_for_how_long() -> None:
    fleet = Fleet("mute", "pinned")
    fleet.broken.add("mute")
    fleet.elsewhere.add("pinned")
    await fleet.reader.read()
    await asyncio.sleep(0.1)
    read = await fleet.reader.read()
    assert [list(figures) for figures in read.values()] == [[AGE], [AGE]]
    assert all(figures[AGE] >= 0.1 for figures in read.values())


async def test_who_takes_no_requests_any_more_is_forgotten() -> None:
    fleet = Fleet("a", "hung")
    fleet.hanging["hung"] = asyncio.Event()
    assert set(await fleet.reader.read()) == {"a", "hung"}
    fleet.ids.remove("hung")
    assert set(await fleet.reader.read()) == {"a"}
    await asyncio.sleep(0)
    assert fleet.num_cancelled == 1


async def test_closing_ends_what_is_asked() -> None:
    fleet = Fleet("hung")
    fleet.hanging["hung"] = asyncio.Event()
    await fleet.reader.read()
    fleet.reader.close()
    await asyncio.sleep(0)
    assert fleet.num_cancelled == 1
