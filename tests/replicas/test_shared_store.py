"""Engines that share through real servers: index and objects together or apart, one dead, or under pressure."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.events import decode_entry
from warmstate.cache_store.index_loader import scan_checkpoints, scan_numbers, scan_segments
from warmstate.cache_store.keys import ObjectKey, chain_root, prefix_keys
from warmstate.cache_store.names import index_names, segment_name
from warmstate.cache_store.redis_client import open_client
from warmstate.cache_store.store_keeper import KeeperLimits, StoreKeeper
from warmstate.replicas.cache.shared_store import SharedStore
from warmstate.replicas.cache.state_codec import CheckpointNames
from warmstate.replicas.config import CacheConfig, StoreConfig

Build = Callable[..., Any]
# However short a prompt, here it is never sooner computed than fetched.
CACHE = CacheConfig(1 << 22, fetch_policy="always")


@pytest.fixture
def start_server() -> Iterator[Callable[..., EmbeddedServer]]:
    started: list[EmbeddedServer] = []

    def start(max_memory_bytes: int = 64 << 20, **arguments: Any) -> EmbeddedServer:
        started.append(EmbeddedServer(max_memory_bytes, **arguments))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def namespace() -> bytes:
    """That of the engines of these tests."""
    return bytes(32)


@pytest.fixture
def replica(join_store: Build) -> Callable[..., tuple[Any, SharedStore]]:
    def build(payload: EmbeddedServer, index: EmbeddedServer | None = None) -> tuple[Any, SharedStore]:
        config = StoreConfig(payload.url, payload.password, operation_timeout_s=1.0)
        if index is not None:
            config = replace(config, index_url=index.url, index_password=index.password)
        joined: tuple[Any, SharedStore] = join_store(config, CACHE)
        return joined

    return build


@pytest.fixture
def ask(run_requests: Build, request_for: Build, prompt_of: Build) -> Callable[..., Any]:
    def run(engine: Any, seed: int = 0, length: int = 600) -> Any:
        request = request_for(prompt_of(length, seed))
        return run_requests(engine, [request])[request.request_id]

    return run


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)


def all_told(shared: SharedStore, num_published: int) -> None:
    wait_for(lambda: shared.link.stats()["published"] >= num_published)
    # What is offered again is on its way, too.
    wait_for(lambda: shared.link.stats()["publish_bytes"] == 0)
    wait_for(lambda: shared.stats()["store_events_waiting"] == 0)


def settle(replicas: list[SharedStore]) -> None:
    """Waits until what each has published is told, and heard by all."""
    wait_for(lambda: all(shared.link.stats()["publish_bytes"] == 0 for shared in replicas))
    wait_for(lambda: all(shared.stats()["store_events_waiting"] == 0 for shared in replicas))
    num_sent = sum(shared.stats()["store_events_sent"] for shared in replicas)
    wait_for(lambda: all(shared.stats()["store_events_read"] == num_sent for shared in replicas))


def kill(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()


def test_rows_describe_what_was_published_and_hits_are_counted(
    start_server: Build, replica: Build, ask: Build, prompt_of: Build, namespace: bytes
) -> None:
    server = start_server()
    engine, shared = replica(server)
    ask(engine)
    all_told(shared, 1)
    client, names = open_client(server.address, 1), index_names(namespace)
    path = prefix_keys(prompt_of(600).astype("uint32"), chain_root())
    (key,) = scan_checkpoints(client, names)
    row, segments = scan_checkpoints(client, names)[key], scan_segments(client, names)
    assert (key, row.position, row.segment_key) == (path[8], 576, path[7])
    assert segments.keys() == {path[3], path[7]}
    assert (segments[path[7]].parent_key, segments[path[3]].parent_key) == (path[3], None)
    assert row.num_bytes > 0
    assert row.epoch == segments[path[7]].epoch > 0
    cold, other = replica(server)
    assert ask(cold).num_cached_tokens == 576
    wait_for(lambda: other.stats()["store_hits_told"] == 1)
    assert scan_numbers(client, names.hits) == {key: 1}
    ask(engine, length=900)
    all_told(shared, 2)
    deeper = next(row for row in scan_checkpoints(client, names).values() if row.position == 896)
    assert (deeper.parent_position, deeper.parent_key, deeper.segment_key) == (576, key, path_of(prompt_of, 900)[11])
    client.close()


def path_of(prompt_of: Build, length: int) -> list[bytes]:
    return prefix_keys(prompt_of(length).astype("uint32"), chain_root())


def test_index_and_objects_on_two_servers_serve_as_one(start_server: Build, replica: Build, ask: Build) -> None:
    payload, index = start_server(), start_server(eviction_policy="noeviction")
    engine, shared = replica(payload, index)
    computed = ask(engine)
    all_told(shared, 1)
    cold, _ = replica(payload, index)
    fetched = ask(cold)
    assert (fetched.num_cached_tokens, fetched.cache_source) == (576, "store")
    assert fetched.output == computed.output
    for server, words in ((payload, (b":ck", b":kv")), (index, (b"ws:ix", b"ws:sg", b"ws:ev", b"ws:live", b"ws:snap"))):
        client = open_client(server.address, 1)
        names = list(client.scan_iter())
        client.close()
        assert all(any(word in name for name in names) for word in words)
    payload_names = open_client(payload.address, 1)
    assert all(payload_names.pttl(name) > 0 for name in payload_names.scan_iter())
    payload_names.close()


def test_a_dead_index_is_a_cold_start_without_delay(start_server: Build, replica: Build, ask: Build) -> None:
    payload, index = start_server(), start_server()
    engine, shared = replica(payload, index)
    computed = ask(engine)
    all_told(shared, 1)
    kill(index)
    cold, other = replica(payload, index)
    started = time.monotonic()
    result = ask(cold)
    assert time.monotonic() - started < 1.0
    assert result.num_cached_tokens == 0
    assert result.output == computed.output
    assert other.stats()["store_follower_failures"] > 0


def test_an_index_that_comes_back_empty_is_told_again_what_the_store_holds(
    start_server: Build, replica: Build, ask: Build, namespace: bytes
) -> None:
    payload, index = start_server(), start_server()
    engine, shared = replica(payload, index)
    ask(engine)
    all_told(shared, 1)
    kill(index)
    again = start_server(port=index.port, password=index.password)
    client = open_client(again.address, 1)
    wait_for(lambda: len(scan_checkpoints(client, index_names(namespace))) == 1)
    cold, _ = replica(payload, again)
    fetched = ask(cold)
    assert (fetched.num_cached_tokens, fetched.cache_source) == (576, "store")
    client.close()


def test_dead_objects_are_a_cold_start_and_their_rows_go(
    start_server: Build, replica: Build, ask: Build, namespace: bytes
) -> None:
    payload, index = start_server(), start_server()
    engine, shared = replica(payload, index)
    computed = ask(engine)
    all_told(shared, 1)
    kill(payload)
    cold, other = replica(payload, index)
    result = ask(cold)
    assert result.num_cached_tokens == 0
    assert result.output == computed.output
    assert other.link.stats()["fetch_misses_unavailable"] == 1
    client = open_client(index.address, 1)
    assert len(scan_checkpoints(client, index_names(namespace))) == 1
    start_server(port=payload.port, password=payload.password)
    colder, last = replica(payload, index)
    assert ask(colder).num_cached_tokens == 0
    assert last.link.stats()["fetch_misses_absent"] == 1
    client.close()


@pytest.mark.parametrize("finder", ["reader", "keeper"])
def test_kv_that_the_store_lost_is_put_again_by_those_who_once_put_it(
    start_server: Build, replica: Build, ask: Build, prompt_of: Build, namespace: bytes, finder: str
) -> None:
    """A checkpoint was told of though some of its KV had gone meanwhile."""
    server = start_server(eviction_policy="noeviction")
    engine, shared = replica(server)
    ask(engine)
    all_told(shared, 1)
    client, names = open_client(server.address, 1), index_names(namespace)
    lost = path_of(prompt_of, 600)[3]
    client.unlink(segment_name(names, lost))
    if finder == "reader":
        cold, other = replica(server)
        # It computes all, and shall not itself put again what it found lost.
        client.config_set("maxmemory", 1)
        assert ask(cold).num_cached_tokens == 0
        wait_for(lambda: any(n for name, n in other.link.stats().items() if name.startswith("publish_dropped")))
        client.config_set("maxmemory", 64 << 20)
        assert other.link.stats()["fetch_misses_absent"] == 1
    else:
        keeper = StoreKeeper(server.address, server.address, "a", KeeperLimits(), 0.05)
        wait_for(lambda: lost not in scan_segments(client, names))
        keeper.close()
    wait_for(lambda: shared.link.lacks(ObjectKey("kv", namespace, lost, 256)))
    deeper = ask(engine, length=900)
    all_told(shared, 2)
    cold, _ = replica(server)
    fetched = ask(cold, length=900)
    assert (fetched.num_cached_tokens, fetched.cache_source) == (896, "store")
    assert fetched.output == deeper.output
    client.close()


def test_a_checkpoint_that_the_keeper_evicted_is_no_longer_taken_for_stored(
    start_server: Build, replica: Build, ask: Build, prompt_of: Build, namespace: bytes
) -> None:
    """Else the replica that put it would for ten minutes not put it again."""
    server = start_server()
    engine, shared = replica(server)
    ask(engine)
    all_told(shared, 1)
    key, names = path_of(prompt_of, 600)[8], CheckpointNames(namespace, 1)
    (name,) = names.checkpoint(key, 576)
    assert not shared.link.lacks(name)
    keeper = StoreKeeper(server.address, server.address, "a", KeeperLimits(budget_bytes=1), 0.05)
    wait_for(lambda: shared.link.lacks(name))
    keeper.close()


def test_under_pressure_with_the_index_on_the_same_server_a_prefix_is_whole_or_a_miss(
    start_server: Build, replica: Build, ask: Build
) -> None:
    """The server may take the whole index."""
    server = start_server(eviction_policy="allkeys-lru")
    engine, shared = replica(server)
    computed = [ask(engine, seed) for seed in range(20)]
    all_told(shared, 20)
    press(server)
    cold, _ = replica(server)
    for seed in range(20):
        result = ask(cold, seed)
        assert result.output == computed[seed].output
        assert result.num_cached_tokens in (0, 576)


def press(server: EmbeddedServer) -> None:
    """Makes the server evict some of the eighty objects that it holds."""
    client: Any = open_client(server.address, 1)
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]))
    for number in range(200):
        client.set(f"ballast {number}", os.urandom(4096), ex=600)
        if client.info("stats")["evicted_keys"] > 10:
            break
    client.config_set("maxmemory", 64 << 20)
    client.close()


@pytest.mark.parametrize(
    ("policy", "together"), [("allkeys-lru", False), ("volatile-lfu", False), ("volatile-lfu", True)]
)
def test_under_the_servers_own_eviction_a_prefix_is_whole_or_a_miss_and_lost_rows_go_on_first_use(
    start_server: Build, replica: Build, ask: Build, prompt_of: Build, namespace: bytes, policy: str, together: bool
) -> None:
    """Rows and events never expire, so a server that evicts only what does leaves them also where it holds both."""
    payload = start_server(eviction_policy=policy)
    index = payload if together else start_server()
    engine, shared = replica(payload, index)
    computed = [ask(engine, seed) for seed in range(20)]
    all_told(shared, 20)
    press(payload)
    names = index_names(namespace)
    keys = [prefix_keys(prompt_of(600, seed).astype("uint32"), chain_root())[8] for seed in range(20)]
    cold, other = replica(payload, index)
    before: Any = open_client(index.address, 1)
    last_id = before.xrevrange(names.events, count=1)[0][0]
    lost = set()
    for seed in range(20):
        result = ask(cold, seed)
        assert result.output == computed[seed].output
        assert result.num_cached_tokens in (0, 576)
        if result.num_cached_tokens == 0:
            lost.add(keys[seed])
    assert 0 < len(lost) < 20
    assert other.link.stats()["fetch_misses_absent"] == len(lost)
    all_told(other, len(lost))
    told = [decode_entry(fields) for _, fields in before.xrange(names.events, min=f"({last_id.decode()}")]
    removed = {entry.event.key for entry in told if entry and entry.event.op == "remove" and entry.event.is_of_store}
    assert removed == lost
    before.close()


def test_a_fork_is_found_by_the_second_prompt_also_where_the_first_was_anothers(
    start_server: Build, replica: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    server = start_server()
    replicas = [replica(server) for _ in range(3)]

    def ask_fork(number: int, seed: int) -> int | None:
        """Prompts share their first 600 tokens; what each leaves is told before the next comes."""
        engine, _ = replicas[number]
        request = request_for(np.concatenate([prompt_of(600), prompt_of(300, seed=100 + seed)]))
        result = run_requests(engine, [request])[request.request_id]
        settle([shared for _, shared in replicas])
        cached: int | None = result.num_cached_tokens
        return cached

    assert [ask_fork(0, 0), ask_fork(1, 1)] == [0, 0]
    assert replicas[1][0].stats()["checkpoints_kept_branch"] == 1
    assert [ask_fork(number, 2 + number) for number in (0, 1, 2)] == [576, 576, 576]
    assert [engine.stats()["checkpoints_kept_branch"] for engine, _ in replicas] == [0, 1, 0]


def test_who_comes_later_hears_of_the_paths_before(
    start_server: Build, replica: Build, ask: Build, prompt_of: Build
) -> None:
    server = start_server()
    engine, shared = replica(server)
    ask(engine)
    settle([shared])
    _, late = replica(server)
    keys = prefix_keys(prompt_of(600).astype(np.uint32), chain_root())
    wait_for(lambda: late.directory.count_known(keys) == 576)
    assert late.directory.count_known(keys[:3]) == 192
    assert late.directory.count_known(prefix_keys(prompt_of(600, 1).astype(np.uint32), chain_root())) == 0
