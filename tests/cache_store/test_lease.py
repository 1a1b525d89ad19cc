"""Who may evict: never two at once, whoever is killed or asleep; on every server."""

import os
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.errors import LeaseLost
from warmstate.cache_store.lease import EvictionLease
from warmstate.cache_store.names import LEASE, IndexNames, index_names
from warmstate.cache_store.redis_client import StoreAddress

Candidate = Callable[..., EvictionLease]


@pytest.fixture
def client(each_server: EmbeddedServer, connect: Callable[[StoreAddress], redis.Redis]) -> Iterator[redis.Redis]:
    opened = connect(each_server.address)
    opened.unlink(LEASE)
    yield opened
    opened.unlink(LEASE)


@pytest.fixture
def candidate(client: redis.Redis) -> Candidate:
    def make(name: str, ttl_ms: int = 60_000, clock: Callable[[], float] = time.monotonic) -> EvictionLease:
        return EvictionLease(client, name, ttl_ms, clock)

    return make


@pytest.fixture
def names() -> IndexNames:
    return index_names(os.urandom(32))


def expire(client: redis.Redis) -> None:
    client.unlink(LEASE)


def test_one_of_two_candidates_holds_it_until_it_lets_go(candidate: Candidate) -> None:
    first, second = candidate("a"), candidate("b")
    assert [first.hold(), second.hold(), first.hold(), second.hold()] == [True, False, True, False]
    assert (first.is_held, second.is_held) == (True, False)
    first.release()
    assert not first.is_held
    assert second.hold()
    assert not first.hold()


def test_a_killed_holder_is_followed_when_its_time_is_over(candidate: Candidate, client: redis.Redis) -> None:
    first, second = candidate("a", ttl_ms=300), candidate("b")
    assert first.hold()
    assert 0 < client.pttl(LEASE) <= 300
    assert not second.hold()
    time.sleep(0.4)
    assert second.hold()
    assert not first.hold()


def test_a_holder_knows_by_its_own_clock_when_its_time_is_over(candidate: Candidate, names: IndexNames) -> None:
    now = [0.0]
    lease = candidate("a", ttl_ms=10_000, clock=lambda: now[0])
    assert lease.hold()
    lease.claim(names)
    now[0] = 10.5
    assert not lease.is_held
    with pytest.raises(LeaseLost):
        lease.change(names, lambda pipeline: pipeline.hset(names.checkpoints, b"k", b"v"))


def test_a_holder_that_slept_past_its_lease_changes_nothing(
    candidate: Candidate, client: redis.Redis, names: IndexNames
) -> None:
    """Its own clock has stood still with it: only the fence stops it."""
    asleep, awake = candidate("a", clock=lambda: 0.0), candidate("b")
    assert asleep.hold()
    asleep.claim(names)
    asleep.change(names, lambda pipeline: pipeline.hset(names.checkpoints, b"k", b"1"))
    expire(client)
    assert awake.hold()
    awake.claim(names)
    assert asleep.is_held
    with pytest.raises(LeaseLost):
        asleep.change(names, lambda pipeline: pipeline.hset(names.checkpoints, b"k", b"2"))
    assert client.hget(names.checkpoints, b"k") == b"1"
    assert not asleep.is_held
    assert asleep.num_lost == 1
    awake.change(names, lambda pipeline: pipeline.hset(names.checkpoints, b"k", b"3"))
    assert client.hget(names.checkpoints, b"k") == b"3"


def test_on_a_full_server_too_an_earlier_holder_changes_nothing(
    candidate: Candidate, client: redis.Redis, names: IndexNames
) -> None:
    asleep, awake = candidate("a", clock=lambda: 0.0), candidate("b")
    assert asleep.hold()
    asleep.claim(names)
    client.hset(names.checkpoints, mapping={b"k": b"1", b"l": b"1"})
    asleep.change_when_full(names, lambda pipeline: pipeline.hdel(names.checkpoints, b"l"))
    expire(client)
    assert awake.hold()
    awake.claim(names)
    with pytest.raises(LeaseLost):
        asleep.change_when_full(names, lambda pipeline: pipeline.hdel(names.checkpoints, b"k"))
    assert client.hgetall(names.checkpoints) == {b"k": b"1"}


def test_a_fence_that_moves_while_a_change_is_under_way_undoes_it(
    candidate: Candidate, client: redis.Redis, names: IndexNames
) -> None:
    asleep, awake = candidate("a", clock=lambda: 0.0), candidate("b")
    assert asleep.hold()
    asleep.claim(names)

    def overtaken(pipeline: redis.client.Pipeline) -> None:
        expire(client)
        assert awake.hold()
        awake.claim(names)
        pipeline.hset(names.checkpoints, b"k", b"2")

    with pytest.raises(LeaseLost):
        asleep.change(names, overtaken)
    assert not client.exists(names.checkpoints)


def test_a_late_claim_of_an_earlier_holder_is_refused(
    candidate: Candidate, client: redis.Redis, names: IndexNames
) -> None:
    asleep, awake = candidate("a", clock=lambda: 0.0), candidate("b")
    assert asleep.hold()
    expire(client)
    assert awake.hold()
    awake.claim(names)
    with pytest.raises(LeaseLost):
        asleep.claim(names)
    awake.change(names, lambda pipeline: pipeline.hset(names.checkpoints, b"k", b"1"))


def test_a_holder_neither_renews_nor_releases_the_lease_of_another(candidate: Candidate, client: redis.Redis) -> None:
    first, second = candidate("a"), candidate("b")
    assert first.hold()
    expire(client)
    assert second.hold()
    first.release()
    assert second.hold()
    assert not first.hold()


def test_a_namespace_that_was_not_claimed_is_not_changed(
    candidate: Candidate, client: redis.Redis, names: IndexNames
) -> None:
    lease = candidate("a")
    assert lease.hold()
    with pytest.raises(LeaseLost):
        lease.change(names, lambda pipeline: pipeline.hset(names.checkpoints, b"k", b"1"))
    assert not client.exists(names.checkpoints)
