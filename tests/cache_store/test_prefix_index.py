"""Who can serve which prefix, at which depth."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from warmstate.cache_store.prefix_index import STORE_HOLDER, IndexRow, PrefixIndex

KEYS = [bytes([number]) * 32 for number in range(6)]


def row(position: int) -> IndexRow:
    return IndexRow(position, "host")


def test_deepest_gives_each_holder_its_deepest_position() -> None:
    index = PrefixIndex()
    index.insert(KEYS[0], "a", row(64))
    index.insert(KEYS[2], "a", row(192))
    index.insert(KEYS[1], "b", row(128))
    index.insert(KEYS[3], STORE_HOLDER, IndexRow(256, "store"))
    assert index.deepest(KEYS[:4]) == {"a": 192, "b": 128, STORE_HOLDER: 256}
    assert index.deepest(KEYS[:2]) == {"a": 64, "b": 128}
    assert index.deepest(KEYS[4:]) == {}
    assert index.deepest([]) == {}


def test_removing_and_dropping_leave_no_trace() -> None:
    index = PrefixIndex()
    for number, key in enumerate(KEYS):
        index.insert(key, "a", row(64 * number))
        index.insert(key, "b", row(64 * number))
    index.remove(KEYS[0], "a")
    index.remove(KEYS[0], "a")
    index.remove(b"unknown", "nobody")
    assert index.find(KEYS[0], "a") is None
    assert index.holders() == {"a": 5, "b": 6}
    index.drop_holder("b")
    assert index.holders() == {"a": 5}
    assert len(index) == 5
    index.drop_holder("a")
    assert (index.holders(), len(index)) == ({}, 0)


def test_the_key_used_least_recently_goes_when_full() -> None:
    index = PrefixIndex(max_keys=3)
    for key in KEYS[:3]:
        index.insert(key, "a", row(64))
    assert index.deepest(KEYS[:1]) == {"a": 64}
    index.insert(KEYS[3], "b", row(64))
    assert index.find(KEYS[1], "a") is None
    assert index.find(KEYS[0], "a") is not None
    assert index.holders() == {"a": 2, "b": 1}


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["insert", "remove", "drop"]), st.sampled_from(KEYS), st.sampled_from("abc")),
    max_size=40,
)


@given(OPERATIONS, st.integers(0, len(KEYS)))
def test_it_agrees_with_a_plain_table(operations: Sequence[tuple[str, bytes, str]], depth: int) -> None:
    index, table = PrefixIndex(), set[tuple[bytes, str]]()
    for name, key, holder in operations:
        if name == "insert":
            index.insert(key, holder, row(64 * KEYS.index(key)))
            table.add((key, holder))
        elif name == "remove":
            index.remove(key, holder)
            table.discard((key, holder))
        else:
            index.drop_holder(holder)
            table = {pair for pair in table if pair[1] != holder}
    expected: dict[str, int] = {}
    for number, key in enumerate(KEYS[:depth]):
        expected |= {holder: 64 * number for holder in "abc" if (key, holder) in table}
    assert index.deepest(KEYS[:depth]) == expected
    assert sum(index.holders().values()) == len(table)
