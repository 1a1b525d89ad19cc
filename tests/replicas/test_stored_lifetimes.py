"""A published checkpoint finds its KV for as long as it lives itself, whoever put that KV and for how long."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.index_loader import scan_checkpoints, scan_segments
from warmstate.cache_store.keys import ObjectKey, chain_root, prefix_keys
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.names import index_names, parse_object_name, segment_name
from warmstate.cache_store.redis_client import open_client
from warmstate.cache_store.store import Dropped, DropReason
from warmstate.cache_store.store_keeper import KeeperLimits
from warmstate.replicas.cache.shared_store import SharedStore
from warmstate.replicas.config import CacheConfig, StoreConfig

Build = Callable[..., Any]
CACHE = CacheConfig(1 << 22, fetch_policy="always")
NAMESPACE = bytes(32)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(64 << 20) as running:
        yield running


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    opened = open_client(server.address, 1)
    yield opened
    opened.close()


@pytest.fixture
def replica(server: EmbeddedServer, join_store: Build) -> Callable[..., tuple[Any, SharedStore]]:
    def build(limits: KeeperLimits | None = None) -> tuple[Any, SharedStore]:
        config = StoreConfig(server.url, server.password, operation_timeout_s=2.0, keeper=limits or KeeperLimits())
        joined: tuple[Any, SharedStore] = join_store(config, CACHE)
        return joined

    return build


@pytest.fixture
def ask(run_requests: Build, request_for: Build, prompt_of: Build) -> Callable[..., Any]:
    def run(engine: Any, length: int = 600, seed: int = 0) -> Any:
        request = request_for(prompt_of(length, seed))
        return run_requests(engine, [request])[request.request_id]

    return run


@pytest.fixture
def segments(prompt_of: Build) -> list[str]:
    """The names of the first two KV segments of the prompt."""
    path = prefix_keys(prompt_of(600).astype("uint32"), chain_root())
    return [segment_name(index_names(NAMESPACE), path[index]) for index in (3, 7)]


def published(shared: SharedStore, count: int) -> None:
    deadline = time.monotonic() + 10
    while shared.link.stats()["published"] < count or shared.stats()["store_events_waiting"]:
        assert time.monotonic() < deadline, shared.link.stats()
        time.sleep(0.02)


def test_a_checkpoint_over_fetched_kv_of_a_short_life_lengthens_it(
    client: redis.Redis, replica: Build, ask: Build, segments: list[str]
) -> None:
    """The end of an answer lives for half an hour; who fetches it may put a checkpoint of a day over its KV."""
    engine, shared = replica()
    ask(engine)
    published(shared, 1)
    for name in client.scan_iter(match="ws:{*.*.*}:*"):
        client.pexpire(name, 60_000)
    fetching, other = replica()
    assert ask(fetching).cache_source == "store"
    ask(fetching, 900)
    published(other, 1)
    assert all(client.pttl(name) > 80_000_000 for name in segments)


def test_kv_that_has_gone_is_put_again_with_the_checkpoint_that_needs_it(
    client: redis.Redis, replica: Build, ask: Build, segments: list[str]
) -> None:
    engine, shared = replica()
    ask(engine)
    published(shared, 1)
    client.unlink(segments[0])
    deeper = ask(engine, 900)
    published(shared, 2)
    assert all(client.exists(name) for name in segments)
    cold, _ = replica()
    fetched = ask(cold, 900)
    assert (fetched.num_cached_tokens, fetched.cache_source) == (896, "store")
    assert fetched.output == deeper.output


def test_replicas_press_against_the_budget_and_leave_nothing_in_parts(
    client: redis.Redis, replica: Build, ask: Build, sharing: Any
) -> None:
    """What does not fit is refused before its first segment: else segments would stay that no row names."""
    engine, shared = replica()
    ask(engine)
    published(shared, 1)
    names = index_names(NAMESPACE)
    one = sum(row.num_bytes for each in (scan_checkpoints, scan_segments) for row in each(client, names).values())
    client.flushall()
    limits = KeeperLimits(budget_bytes=4 * one + one // 2)
    pressing = [replica(limits) for _ in range(2)]
    for seed in range(1, 11):
        engine, shared = pressing[seed % 2]
        ask(engine, seed=seed)
        sharing.drain(shared.link)
    stats = [shared.link.stats() for _, shared in pressing]
    assert [sum(each[name] for each in stats) for name in ("published", "publish_dropped_no_room")] == [4, 6]
    for (_, shared), each in zip(pressing, stats, strict=True):
        published(shared, int(each["published"]))
    rows = {"ck": set(scan_checkpoints(client, names)), "kv": set(scan_segments(client, names))}
    objects = [parse_object_name(name.decode()) for name in client.scan_iter(match="ws:{*.*.*}:*", count=1000)]
    held = {kind: {each.prefix for each in objects if each is not None and each.kind == kind} for kind in ("ck", "kv")}
    assert held == rows


class FullFrom(MemoryStore):
    """Takes no checkpoint while `is_full`; remembers what it was asked to take."""

    is_full = True

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.puts: list[ObjectKey] = []

    async def put(self, key: ObjectKey, *arguments: Any) -> Any:
        self.puts.append(key)
        if self.is_full and key.kind == "ck":
            return Dropped(DropReason.NO_ROOM)
        return await super().put(key, *arguments)


def test_kv_of_a_checkpoint_that_did_not_come_is_told_with_the_next(
    fake_backend: Build, engine_over: Build, sharing: Any, ask: Build
) -> None:
    """No row names what a dropped publication left behind, so the next one must bring its rows."""
    backend, store = fake_backend(num_blocks=100), FullFrom()
    link = sharing.link(backend, store)
    engine = engine_over(backend, link=link, cache=CACHE)
    ask(engine)
    sharing.drain(link)
    store.is_full = False
    store.puts.clear()
    ask(engine, 900)
    sharing.drain(link)
    assert [key.position for key in store.puts if key.kind == "kv"] == [256, 512, 768]
