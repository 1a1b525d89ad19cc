"""Which rows of an index nobody can use, whatever they say of each other."""

from warmstate.cache_store.index_rows import StoredCheckpoint, StoredSegment
from warmstate.cache_store.names import IndexNames
from warmstate.cache_store.store_census import find_broken
from warmstate.cache_store.store_ledger import NamespaceLedger

NOW_MS = 1_000_000


def key(name: str) -> bytes:
    return name.encode().ljust(32, b"-")


def segment(stop: int, above: str | None, created_ms: int = 0) -> StoredSegment:
    return StoredSegment(stop, 100, key(above) if above else None, created_ms, 3600, 1)


def checkpoint(position: int, last: str | None) -> StoredCheckpoint:
    return StoredCheckpoint(position, 1, 1000, 0, None, key(last) if last else None, 0, 3600, 1)


def broken(checkpoints: dict[str, StoredCheckpoint], segments: dict[str, StoredSegment]) -> tuple[set[str], set[str]]:
    ledger = NamespaceLedger(
        IndexNames("0" * 16),
        {key(name): row for name, row in checkpoints.items()},
        {key(name): row for name, row in segments.items()},
        {},
        {},
    )
    found = find_broken(ledger, older_than_ms=NOW_MS)
    names = {key(name): name for name in (*checkpoints, *segments)}
    return {names[each] for each in found.lost_kv.checkpoints}, {names[each] for each in found.unneeded_kv.segments}


CHAIN = {"s1": segment(256, None), "s2": segment(512, "s1"), "s3": segment(768, "s2")}


def test_whole_chains_stay() -> None:
    checkpoints = {"a": checkpoint(64, None), "b": checkpoint(300, "s1"), "c": checkpoint(768, "s3")}
    assert broken(checkpoints, CHAIN) == (set(), set())


def test_a_gap_anywhere_takes_all_below_it_and_nothing_above() -> None:
    checkpoints = {"b": checkpoint(300, "s1"), "c": checkpoint(768, "s3"), "d": checkpoint(832, "s3")}
    for gone, lost, unneeded in (("s1", "bcd", {"s2", "s3"}), ("s2", "cd", {"s3"}), ("s3", "cd", {"s2"})):
        segments = {name: row for name, row in CHAIN.items() if name != gone}
        assert broken(checkpoints, segments) == (set(lost), unneeded), gone


def test_rows_that_contradict_each_other_are_a_gap() -> None:
    assert broken({"c": checkpoint(512, "s1")}, CHAIN) == ({"c"}, {"s1", "s2", "s3"})
    circle = {"s1": segment(512, "s2"), "s2": segment(512, "s1")}
    assert broken({"c": checkpoint(512, "s2")}, circle) == ({"c"}, {"s1", "s2"})
    jump = {"s1": segment(256, None), "s3": segment(768, "s1")}
    assert broken({"c": checkpoint(768, "s3")}, jump) == ({"c"}, {"s1", "s3"})


def test_segments_just_put_wait_for_their_checkpoint() -> None:
    segments = {"s1": segment(256, None, NOW_MS), "s2": segment(512, "s1", NOW_MS - 1)}
    assert broken({}, segments) == (set(), {"s2"})
