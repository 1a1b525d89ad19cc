"""The view of the replicas, over a real server."""

import time
from collections.abc import Callable, Iterator

import pytest

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import PrefixEvent
from warmstate.cache_store.prefix_index import IndexRow, PrefixIndex
from warmstate.cache_store.replica_rows import ReplicaRow, ReplicaRows
from warmstate.cluster.routing.replica_view import RoutedView
from warmstate.cluster.routing.router import RoutingTable
from warmstate.cluster.routing.store_view import StoreView
from warmstate.replicas.messages import ReplicaPhase

NAMESPACE = bytes(range(32))
KEY = b"k" * 32


def row(replica_id: str, phase: str, fraction: float = 1.0) -> ReplicaRow:
    return ReplicaRow(replica_id, 1, phase, fraction, "", NAMESPACE.hex(), {"engine_steps": 3.0})


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(64 << 20) as running:
        yield running


@pytest.fixture
def rows(server: EmbeddedServer) -> Iterator[ReplicaRows]:
    writer = ReplicaRows(server.address)
    yield writer
    writer.close()


@pytest.fixture
def table() -> RoutingTable:
    return RoutingTable()


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


@pytest.fixture
def view(server: EmbeddedServer, table: RoutingTable, index: PrefixIndex) -> Iterator[StoreView]:
    running = StoreView(server.address, table, index)
    yield running
    running.close()


def test_phases_come_from_the_rows_and_readiness_from_serve(
    view: StoreView, rows: ReplicaRows, table: RoutingTable
) -> None:
    rows.write(row("a", "loading", 0.25))
    rows.write(row("b", "ready"))
    rows.write(row("c", "a phase of the next version"))
    wait_until(lambda: len(view.phases()) == 3)
    assert view.phases() == {
        "a": ReplicaPhase("loading", 0.25),
        "b": ReplicaPhase("warming", 1.0),
        "c": ReplicaPhase("loading", 1.0),
    }
    table.set_replicas(["b"])
    assert view.phases()["b"] == ReplicaPhase("ready", 1.0)
    assert list(view.ready()) == ["b"]


def test_the_index_follows_the_replicas_events(
    view: StoreView, server: EmbeddedServer, rows: ReplicaRows, index: PrefixIndex
) -> None:
    rows.write(row("a", "ready"))
    log = EventLog(server.address, NAMESPACE, "a", 1)
    log.append(PrefixEvent("add", KEY, 64, "device"))
    wait_until(lambda: index.deepest([KEY]) == {"a": 64})
    log.close()


def test_what_a_dead_replica_held_is_forgotten(view: StoreView, rows: ReplicaRows, index: PrefixIndex) -> None:
    index.insert(KEY, "dead", IndexRow(64, "device"))
    index.insert(KEY, "store", IndexRow(64, "store"))
    rows.write(row("a", "ready"))
    wait_until(lambda: index.deepest([KEY]) == {"store": 64})


def test_what_a_late_replica_holds_is_kept(
    view: StoreView, rows: ReplicaRows, index: PrefixIndex, table: RoutingTable
) -> None:
    table.set_replicas(["late"])
    index.insert(KEY, "late", IndexRow(64, "device"))
    index.insert(KEY, "dead", IndexRow(64, "device"))
    rows.write(row("a", "ready"))
    wait_until(lambda: index.deepest([KEY]) == {"late": 64})


def test_while_the_store_is_away_the_last_rows_stand(
    view: StoreView, server: EmbeddedServer, rows: ReplicaRows, table: RoutingTable
) -> None:
    rows.write(row("a", "loading", 0.5))
    wait_until(lambda: "a" in view.phases())
    server.stop()
    time.sleep(1.5)
    assert view.phases() == {"a": ReplicaPhase("loading", 0.5)}


def test_without_a_store_readiness_is_all_that_is_known(table: RoutingTable) -> None:
    view = RoutedView(table)
    (someone,) = view.phases().values()
    assert someone.phase == "loading"
    table.set_replicas(["a"])
    assert view.phases() == {"a": ReplicaPhase("ready", 1.0)}


def test_the_log_says_once_that_the_store_is_away_and_once_that_it_is_back(
    table: RoutingTable, index: PrefixIndex, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "warmstate.cluster.routing.store_view")
    with EmbeddedServer(64 << 20) as lost:
        address, port, password = lost.address, lost.port, lost.password
    view = StoreView(address, table, index)
    try:
        wait_until(lambda: len(caplog.records) > 0)
        # Its next look, a second later, must add nothing.
        time.sleep(1.5)
        with EmbeddedServer(64 << 20, port=port, password=password):
            wait_until(lambda: len(caplog.records) > 1)
    finally:
        view.close()
    assert [record.levelname for record in caplog.records][:2] == ["WARNING", "INFO"]
    assert address.url in caplog.messages[0]
    assert caplog.messages[1] == "the store is back"
