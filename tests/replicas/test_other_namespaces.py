"""Whether a prompt is known under other weights or another version: asked of a real index."""

from collections.abc import Iterator

import pytest

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import PrefixEvent
from warmstate.cache_store.index_rows import StoredCheckpoint
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.replicas.cache.other_namespaces import OtherNamespaces

OURS, THEIRS = bytes(32), bytes([7]) * 32
KEYS = [bytes([index]) * 32 for index in range(1, 11)]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as running:
        yield running


def publish(address: StoreAddress, namespace: bytes, position: int) -> None:
    row = StoredCheckpoint(position, 1, 100, 0, None, None if position < 256 else KEYS[3], 1, 600, 1, "")
    log = EventLog(address, namespace, f"replica-{namespace[:1].hex()}", 1)
    log.append(PrefixEvent("add", KEYS[position // 64 - 1], position, "store"), row, {})
    log.close()


def test_the_deepest_prefix_of_another_namespace_is_found_and_our_own_is_not(server: EmbeddedServer) -> None:
    now = [1000.0]
    other = OtherNamespaces(server.address, OURS, clock=lambda: now[0])
    assert other.find_deepest(KEYS) == 0
    publish(server.address, OURS, 512)
    publish(server.address, THEIRS, 256)
    publish(server.address, THEIRS, 128)
    now[0] += 31
    assert other.find_deepest(KEYS) == 256
    now[0] += 1
    assert other.find_deepest(KEYS[:2]) == 128
    now[0] += 1
    assert other.find_deepest(KEYS[:1]) == 0
    other.close()


def test_it_asks_no_more_than_ten_times_a_second(server: EmbeddedServer) -> None:
    publish(server.address, THEIRS, 256)
    now = [1000.0]
    other = OtherNamespaces(server.address, OURS, clock=lambda: now[0])
    assert other.find_deepest(KEYS) == 256
    now[0] += 0.05
    assert other.find_deepest(KEYS) == 0
    now[0] += 0.06
    assert other.find_deepest(KEYS) == 256
    other.close()


def test_a_server_that_is_away_is_nobody_who_knows_and_is_left_alone_for_a_while() -> None:
    now = [1000.0]
    other = OtherNamespaces(StoreAddress("redis://127.0.0.1:1/0"), OURS, clock=lambda: now[0])
    assert other.find_deepest(KEYS) == 0
    now[0] += 29
    assert other.find_deepest(KEYS) == 0
    other.close()
