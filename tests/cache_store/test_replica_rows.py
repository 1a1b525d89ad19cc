"""The rows that say who is alive."""

from collections.abc import Callable, Iterator

import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.errors import StoreUnavailable
from warmstate.cache_store.names import REPLICA_IDS, replica_row_name
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.replica_rows import ROW_TTL_MS, ReplicaRow, ReplicaRows

LOADING = ReplicaRow("a", 7, "loading", 0.25, "shard 1 of 4", "ab" * 32, {"queued": 3.0})
READY = ReplicaRow("b", 8, "ready", 1.0)


@pytest.fixture
def rows(server: EmbeddedServer) -> Iterator[ReplicaRows]:
    made = ReplicaRows(server.address)
    yield made
    for replica_id in made.read():
        made.delete(replica_id)
    made.close()


@pytest.fixture
def client(server: EmbeddedServer, connect: Callable[[StoreAddress], redis.Redis]) -> redis.Redis:
    return connect(server.address)


def test_rows_come_back_by_replica(rows: ReplicaRows) -> None:
    assert rows.read() == {}
    rows.write(LOADING)
    rows.write(READY)
    assert rows.read() == {"a": LOADING, "b": READY}


def test_a_row_expires_unless_it_is_renewed(rows: ReplicaRows, client: redis.Redis) -> None:
    rows.write(LOADING)
    assert 0 < client.pttl(replica_row_name("a")) <= ROW_TTL_MS
    client.unlink(replica_row_name("a"))
    assert rows.read() == {}
    assert client.scard(REPLICA_IDS) == 0
    rows.write(LOADING)
    assert rows.read() == {"a": LOADING}


def test_a_deleted_row_is_gone_at_once(rows: ReplicaRows) -> None:
    rows.write(LOADING)
    rows.delete("a")
    rows.delete("a")
    assert rows.read() == {}


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        b'{"replica_id": "a"}',
        b'{"replica_id":"a","epoch":1,"phase":"x","fraction":9}',
        b'{"replica_id":"a","epoch":1,"phase":"x","fraction":1,"namespace":"of another version"}',
    ],
)
def test_a_row_that_cannot_be_read_is_left_out(rows: ReplicaRows, client: redis.Redis, value: bytes) -> None:
    rows.write(LOADING)
    rows.write(READY)
    client.set(replica_row_name("a"), value)
    assert rows.read() == {"b": READY}


def test_a_server_that_is_away_raises_store_unavailable_without_the_password() -> None:
    rows = ReplicaRows(StoreAddress("redis://user:hidden@127.0.0.1:1/0", "secret"))
    for call in (rows.read, lambda: rows.write(READY), lambda: rows.delete("b")):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert "127.0.0.1:1" in str(caught.value)
        assert "hidden" not in str(caught.value)
        assert "secret" not in str(caught.value)
    assert "secret" not in repr(StoreAddress("redis://h", "secret"))


def test_a_url_that_is_none_raises_store_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="http://example"):
        ReplicaRows(StoreAddress("http://example"))
