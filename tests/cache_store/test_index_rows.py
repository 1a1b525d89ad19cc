"""The packed rows of the index, and the names of what they describe."""

import os
from dataclasses import replace

import pytest

from warmstate.cache_store.index_rows import (
    ROW_VERSION,
    StoredCheckpoint,
    StoredSegment,
    decode_checkpoint,
    decode_segment,
    is_of_newer_version,
)
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.names import object_name, objects_pattern, parse_object_name, temporary_name

KEY, PARENT, SEGMENT = b"k" * 32, b"p" * 32, b"s" * 32
CHECKPOINT = StoredCheckpoint(832, 4, 1 << 40, 512, PARENT, SEGMENT, 1_700_000_000_000, 86_400, 2**60, "turn_start")
STORED_SEGMENT = StoredSegment(512, 16 << 20, PARENT, 1_700_000_000_000, 1800, 2**60)


def test_rows_come_back_as_they_were_and_are_small() -> None:
    shallow = StoredCheckpoint(64, 1, 0, 0, None, None, 0, 1, 0)
    for row in (CHECKPOINT, shallow):
        assert decode_checkpoint(KEY, row.encode()) == row
    first = StoredSegment(256, 1, None, 0, 1, 0)
    for segment in (STORED_SEGMENT, first):
        assert decode_segment(KEY, segment.encode()) == segment
    assert len(CHECKPOINT.encode()) <= 128
    assert len(STORED_SEGMENT.encode()) <= 80
    assert CHECKPOINT.expires_ms == 1_700_086_400_000


def test_a_kind_is_cut_to_its_limit() -> None:
    row = decode_checkpoint(KEY, replace(CHECKPOINT, kind="ö" + 50 * "x").encode())
    assert row is not None
    assert row.kind == "?" + 15 * "x"


@pytest.mark.parametrize(
    "row",
    [
        replace(CHECKPOINT, position=0),
        replace(CHECKPOINT, position=833),
        replace(CHECKPOINT, num_groups=0),
        replace(CHECKPOINT, parent_position=832),
        replace(CHECKPOINT, parent_key=None),
        replace(CHECKPOINT, parent_position=0),
        replace(CHECKPOINT, segment_key=None),
        replace(CHECKPOINT, position=128, parent_position=64),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_none(row: StoredCheckpoint) -> None:
    assert decode_checkpoint(KEY, row.encode()) is None


@pytest.mark.parametrize(
    "row",
    [
        replace(STORED_SEGMENT, position=64),
        replace(STORED_SEGMENT, parent_key=None),
        replace(STORED_SEGMENT, position=256),
    ],
)
def test_a_segment_that_contradicts_itself_is_none(row: StoredSegment) -> None:
    assert decode_segment(KEY, row.encode()) is None


def test_whatever_is_no_row_is_none() -> None:
    for data in (b"", b"x", os.urandom(60), os.urandom(103), os.urandom(4096), CHECKPOINT.encode()[:-20]):
        assert decode_checkpoint(KEY, b"\0" + data[1:]) is None
        assert decode_segment(KEY, data) is None
    assert decode_checkpoint(KEY, CHECKPOINT.encode() + b"xxxxxxxx") is None
    assert decode_checkpoint(KEY[:-1], CHECKPOINT.encode()) is None
    assert decode_segment(KEY + b"k", STORED_SEGMENT.encode()) is None
    assert decode_segment(KEY, STORED_SEGMENT.encode() + b"x") is None


def test_a_row_of_a_newer_version_is_told_from_damage() -> None:
    newer = bytes([ROW_VERSION + 1]) + CHECKPOINT.encode()[1:]
    assert decode_checkpoint(KEY, newer) is None
    assert is_of_newer_version(newer)
    assert not is_of_newer_version(CHECKPOINT.encode())
    assert not is_of_newer_version(b"")


def test_the_name_of_an_object_tells_what_it_is() -> None:
    key = ObjectKey("ck", bytes(range(32)), PARENT, 512, 3)
    found = parse_object_name(object_name(key))
    assert found is not None
    assert (found.short_namespace, found.prefix, found.group, found.kind) == ("0001020304050607", PARENT, 3, "ck")
    assert str(found) == object_name(key)
    temporary = parse_object_name(temporary_name(key))
    assert temporary is not None
    assert temporary.kind == "tmp"
    assert object_name(key).startswith(objects_pattern("0001020304050607").rstrip("*"))


@pytest.mark.parametrize("name", ["", "ws:reps", "ws:ix:{0001020304050607}", "ws:{00.11.0}:ck", "user:{x}:ck"])
def test_other_names_are_no_objects(name: str) -> None:
    assert parse_object_name(name) is None
