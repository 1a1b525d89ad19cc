"""Work that several want at once is done once, as long as one of them still wants it."""

import asyncio

import pytest

from warmstate.replicas.cache.single_flight import SingleFlight


class Work:
    """Counts its runs; ends when told to."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.num_cancelled = 0
        self.may_end = asyncio.Event()
        self.fault: Exception | None = None

    async def run(self) -> int:
        self.num_runs += 1
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.fault is not None:
            raise self.fault
        return 42


async def test_whoever_comes_in_time_shares_the_work() -> None:
    work, flights = Work(), SingleFlight[int]()
    tasks = [asyncio.create_task(flights.join("a", work.run)) for _ in range(3)]
    await asyncio.sleep(0)
    assert flights.is_running("a")
    work.may_end.set()
    assert await asyncio.gather(*tasks) == [42, 42, 42]
    assert work.num_runs == 1
    assert not flights.is_running("a")
    assert await flights.join("a", work.run) == 42
    assert work.num_runs == 2


async def test_keys_do_not_share() -> None:
    work, flights = Work(), SingleFlight[int]()
    work.may_end.set()
    await asyncio.gather(flights.join("a", work.run), flights.join("b", work.run))
    assert work.num_runs == 2


async def test_one_that_gives_up_leaves_the_work_to_the_others() -> None:
    work, flights = Work(), SingleFlight[int]()
    first, second = (asyncio.create_task(flights.join("a", work.run)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    work.may_end.set()
    assert await second == 42
    assert (work.num_runs, work.num_cancelled) == (1, 0)


async def test_the_last_to_give_up_ends_the_work_and_the_next_starts_anew() -> None:
    work, flights = Work(), SingleFlight[int]()
    first = asyncio.create_task(flights.join("a", work.run))
    await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not flights.is_running("a")
    work.may_end.set()
    assert await flights.join("a", work.run) == 42
    assert (work.num_runs, work.num_cancelled) == (2, 1)


async def test_a_failure_reaches_everyone_and_is_not_kept() -> None:
    work, flights = Work(), SingleFlight[int]()
    work.fault = ValueError("broken")
    work.may_end.set()
    outcomes = await asyncio.gather(*(flights.join("a", work.run) for _ in range(2)), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["broken", "broken"]
    work.fault = None
    assert await flights.join("a", work.run) == 42
