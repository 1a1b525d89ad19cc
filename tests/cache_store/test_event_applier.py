"""What a reader knows after gaps, snapshots and trimmed beginnings is what one from the beginning knows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from warmstate.cache_store.event_applier import EventApplier
from warmstate.cache_store.events import EventEntry, PrefixEvent
from warmstate.cache_store.prefix_index import STORE_HOLDER, IndexRow, PrefixIndex
from warmstate.cache_store.snapshots import Snapshot

NAMESPACE = bytes(32)
KEYS = [bytes([number]) * 32 for number in range(4)]


def entry(seq: int, number: int, op: str = "add", epoch: int = 1) -> EventEntry:
    event = PrefixEvent("add" if op == "add" else "remove", KEYS[number], 64 * (number + 1), "host")
    return EventEntry("a", epoch, seq, event)


def snapshot_after(entries: list[EventEntry], epoch: int = 1) -> Snapshot:
    """What the replica writes once these have happened."""
    rows: dict[bytes, IndexRow] = {}
    for each in entries:
        if each.event.op == "add":
            rows[each.event.key] = IndexRow(each.event.position, each.event.tier)
        else:
            rows.pop(each.event.key, None)
    return Snapshot("a", NAMESPACE, epoch, len(entries), "0-0", rows)


def held(index: PrefixIndex) -> set[bytes]:
    return {key for key in KEYS if index.find(key, "a") is not None}


HISTORIES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["add", "remove"])), min_size=1, max_size=12)


@settings(max_examples=400, deadline=None)
@given(HISTORIES, st.data())
def test_any_late_joiner_ends_with_what_one_from_the_beginning_has(
    history: list[tuple[int, str]], data: st.DataObject
) -> None:
    """The snapshot lies anywhere, the stream begins anywhere at or before its end, and may miss a run of entries that
    the snapshot holds."""
    entries = [entry(seq, number, op) for seq, (number, op) in enumerate(history)]
    taken_at = data.draw(st.integers(0, len(entries)), "snapshot")
    begins_at = data.draw(st.integers(0, taken_at), "stream begins")
    gap_at = data.draw(st.integers(0, taken_at), "gap begins")
    gap_end = data.draw(st.integers(gap_at, taken_at), "gap ends")
    seen = [each for each in entries[begins_at:] if not gap_at <= each.seq < gap_end]
    snapshot_before = data.draw(st.integers(0, len(seen)), "snapshot is read before")

    expected, actual = PrefixIndex(), PrefixIndex()
    reference = EventApplier(expected)
    for each in entries:
        reference.apply(each)
    applier = EventApplier(actual)
    for number, each in enumerate(seen):
        if number == snapshot_before:
            applier.take_snapshot(snapshot_after(entries[:taken_at]))
        applier.apply(each)
    applier.take_snapshot(snapshot_after(entries[:taken_at]))
    assert held(actual) == held(expected)
    assert applier.incomplete() == []


def test_a_stream_that_was_trimmed_waits_for_a_snapshot_and_uses_what_it_has() -> None:
    index = PrefixIndex()
    applier = EventApplier(index)
    applier.apply(entry(7, 2))
    assert applier.incomplete() == ["a"]
    assert held(index) == {KEYS[2]}
    too_old = Snapshot("a", NAMESPACE, 1, 6, "0-0", {KEYS[0]: IndexRow(64, "host")})
    applier.take_snapshot(too_old)
    assert applier.incomplete() == ["a"]
    applier.take_snapshot(Snapshot("a", NAMESPACE, 1, 7, "0-0", {KEYS[0]: IndexRow(64, "host")}))
    assert applier.incomplete() == []
    assert held(index) == {KEYS[0], KEYS[2]}


def test_a_snapshot_ahead_of_the_stream_leaves_no_new_gap_behind_it() -> None:
    """The stream may be trimmed between the last entry that was read and the first that the snapshot lacks."""
    index = PrefixIndex()
    applier = EventApplier(index)
    applier.apply(entry(7, 2))
    applier.take_snapshot(Snapshot("a", NAMESPACE, 1, 10, "0-0", {KEYS[0]: IndexRow(64, "host")}))
    applier.apply(entry(10, 3))
    assert applier.incomplete() == []
    assert held(index) == {KEYS[0], KEYS[3]}
    assert applier.num_gaps == 0


def test_a_snapshot_of_an_older_life_changes_nothing() -> None:
    index = PrefixIndex()
    applier = EventApplier(index)
    applier.apply(entry(0, 1, epoch=5))
    applier.take_snapshot(snapshot_after([entry(0, 0)], epoch=4))
    assert held(index) == {KEYS[1]}


def test_a_snapshot_of_a_newer_life_replaces_the_older() -> None:
    index = PrefixIndex()
    applier = EventApplier(index)
    applier.apply(entry(0, 1, epoch=5))
    applier.take_snapshot(snapshot_after([entry(0, 0)], epoch=6))
    applier.apply(entry(1, 2, epoch=5))
    assert held(index) == {KEYS[0]}


def test_whoever_will_write_no_snapshot_any_more_is_waited_for_no_longer() -> None:
    applier = EventApplier(PrefixIndex())
    applier.apply(entry(7, 2))
    applier.give_up(["a"])
    assert applier.incomplete() == []


def test_the_rows_of_the_store_are_corrected_by_the_entries_behind_them() -> None:
    index = PrefixIndex()
    applier = EventApplier(index)
    applier.put_stored({KEYS[0]: 64, KEYS[1]: 128})
    removal = PrefixEvent("remove", KEYS[0], 64, "store")
    applier.apply(EventEntry("keeper", 1, 9, removal))
    assert index.find(KEYS[0], STORE_HOLDER) is None
    assert index.find(KEYS[1], STORE_HOLDER) == IndexRow(128, "store")
    applier.reset()
    assert len(index) == 0
