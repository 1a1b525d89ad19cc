"""Owns what the index says of the shared store: one row per checkpoint and one per KV segment, and their packed form.

Knows no server. A checkpoint names the last KV segment below it, and every segment the one before it: so the rows of a
namespace are a tree, and what a checkpoint needs is the way to the root. Rows are hints: objects verify themselves.
Layout (little-endian): version u8, then the fields of the row in their order; an absent key is 32 zero bytes.
"""

import struct
from dataclasses import dataclass

from warmstate.cache_store.keys import BLOCK_TOKENS, KEY_BYTES, SEGMENT_TOKENS

ROW_VERSION = 1

MAX_KIND_BYTES = 16

_CHECKPOINT = struct.Struct("<BIHQI32s32sQIQ")
_SEGMENT = struct.Struct("<BIQ32sQIQ")
_NO_KEY = bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint that is whole in the store: `num_bytes` of its head groups together, without KV segments.

    `parent_key` is the next shallower checkpoint that the store held when this was written, `segment_key` the last
    whole KV segment below `position`; `epoch` is the writer's; `kind` says why the position was chosen.
    """

    position: int
    num_groups: int
    num_bytes: int
    parent_position: int
    parent_key: bytes | None
    segment_key: bytes | None
    created_ms: int
    ttl_s: int
    epoch: int
    kind: str = ""

    @property
    def expires_ms(self) -> int:
        return self.created_ms + 1000 * self.ttl_s

    def encode(self) -> bytes:
        fixed = _CHECKPOINT.pack(
            ROW_VERSION,
            self.position,
            self.num_groups,
            self.num_bytes,
            self.parent_position,
            self.parent_key or _NO_KEY,
            self.segment_key or _NO_KEY,
            self.created_ms,
            self.ttl_s,
            self.epoch,
        )
        return fixed + self.kind.encode("ascii", "replace")[:MAX_KIND_BYTES]


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A KV segment in the store, which ends at `position`; `parent_key` is the segment that ends where it starts."""

    position: int
    num_bytes: int
    parent_key: bytes | None
    created_ms: int
    ttl_s: int
    epoch: int

    @property
    def expires_ms(self) -> int:
        return self.created_ms + 1000 * self.ttl_s

    def encode(self) -> bytes:
        parent_key = self.parent_key or _NO_KEY
        return _SEGMENT.pack(
            ROW_VERSION, self.position, self.num_bytes, parent_key, self.created_ms, self.ttl_s, self.epoch
        )


def is_of_newer_version(data: bytes) -> bool:
    """Whether a newer writer made this row: not ours to read, nor to remove."""
    return data[:1] > bytes([ROW_VERSION])


def decode_checkpoint(key: bytes, data: bytes) -> StoredCheckpoint | None:
    """None for what is not a row of this version, or contradicts itself."""
    if len(key) != KEY_BYTES or not _CHECKPOINT.size <= len(data) <= _CHECKPOINT.size + MAX_KIND_BYTES:
        return None
    version, position, num_groups, num_bytes, parent_position, parent, segment, *rest = _CHECKPOINT.unpack_from(data)
    kind = data[_CHECKPOINT.size :]
    if version != ROW_VERSION or not kind.isascii() or not num_groups:
        return None
    if not _is_boundary(position, BLOCK_TOKENS) or parent_position >= position:
        return None
    parent_key, segment_key = _key_or_none(parent), _key_or_none(segment)
    if (parent_key is None) != (parent_position == 0) or (segment_key is None) != (position < SEGMENT_TOKENS):
        return None
    created_ms, ttl_s, epoch = rest
    return StoredCheckpoint(
        position,
        num_groups,
        num_bytes,
        parent_position,
        parent_key,
        segment_key,
        created_ms,
        ttl_s,
        epoch,
        kind.decode(),
    )


def decode_segment(key: bytes, data: bytes) -> StoredSegment | None:
    """None for what is not a row of this version, or contradicts itself."""
    if len(key) != KEY_BYTES or len(data) != _SEGMENT.size:
        return None
    version, position, num_bytes, parent, created_ms, ttl_s, epoch = _SEGMENT.unpack(data)
    parent_key = _key_or_none(parent)
    if version != ROW_VERSION or not _is_boundary(position, SEGMENT_TOKENS):
        return None
    if (parent_key is None) != (position == SEGMENT_TOKENS):
        return None
    return StoredSegment(position, num_bytes, parent_key, created_ms, ttl_s, epoch)


def _is_boundary(position: int, step: int) -> bool:
    return position > 0 and position % step == 0


def _key_or_none(key: bytes) -> bytes | None:
    return None if key == _NO_KEY else key
