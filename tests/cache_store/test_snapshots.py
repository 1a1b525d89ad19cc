"""The packed snapshot of a replica."""

import os

import pytest

from warmstate.cache_store.prefix_index import IndexRow
from warmstate.cache_store.snapshots import MAX_SNAPSHOT_ROWS, Snapshot, decode_snapshot

NAMESPACE = bytes(range(32))


def snapshot(num_rows: int) -> Snapshot:
    rows = {os.urandom(32): IndexRow(64 * (number + 1), ("device", "host")[number % 2]) for number in range(num_rows)}
    return Snapshot("a", NAMESPACE, 2**60, 77, "1700000000000-3", rows)


@pytest.mark.parametrize("num_rows", [0, 1, 500])
def test_a_snapshot_comes_back_as_it_was(num_rows: int) -> None:
    written = snapshot(num_rows)
    data = written.encode()
    assert decode_snapshot("a", data) == written
    assert len(data) <= 128 + 37 * num_rows


def test_a_snapshot_has_a_limit_and_keeps_the_latest_rows() -> None:
    written = snapshot(MAX_SNAPSHOT_ROWS + 10)
    read = decode_snapshot("a", written.encode())
    assert read is not None
    assert list(read.rows) == list(written.rows)[10:]


def test_every_damaged_byte_is_noticed() -> None:
    data = snapshot(2).encode()
    for at in range(len(data)):
        assert decode_snapshot("a", data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]) is None
        assert decode_snapshot("a", data[:at]) is None
    assert decode_snapshot("a", data + b"x") is None
