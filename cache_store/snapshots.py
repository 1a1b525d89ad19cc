"""Owns the form in which a replica tells, all at once, what its own tiers can serve. Knows no server.

A reader that has missed events takes the snapshot for them. Layout (little-endian):

    head  magic 4s | version u8 | namespace 32s | epoch u64 | next seq u64 | stream id 2 x u64 | number of rows u32
    rows  prefix key 32s | position u32 | tier u8
    seal  xxh3_128 of all bytes before it
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from warmstate.cache_store.keys import BLOCK_TOKENS
from warmstate.cache_store.prefix_index import IndexRow, Tier

MAX_SNAPSHOT_ROWS = 50_000

_MAGIC = b"WSSN"
_VERSION = 1
_HEAD = struct.Struct("<4sB32sQQQQI")
_ROW = struct.Struct("<32sIB")
_SEAL_BYTES = 16
_TIERS: tuple[Tier, ...] = ("device", "host")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the replica `replica_id` can serve once its events below `next_seq` of this epoch have happened.

    All of its events from `next_seq` on lie behind `stream_id` in the stream.
    """

    replica_id: str
    namespace: bytes
    epoch: int
    next_seq: int
    stream_id: str
    rows: Mapping[bytes, IndexRow]

    def encode(self) -> bytes:
        milliseconds, number = self.stream_id.split("-")
        rows = list(self.rows.items())[-MAX_SNAPSHOT_ROWS:]
        head = _HEAD.pack(
            _MAGIC,
            _VERSION,
            self.namespace,
            self.epoch,
            self.next_seq,
            int(milliseconds),
            int(number),
            len(rows),
        )
        body = b"".join(_ROW.pack(key, row.position, _TIERS.index(row.tier)) for key, row in rows)
        return head + body + _seal(head + body)


def decode_snapshot(replica_id: str, data: bytes) -> Snapshot | None:
    """None for what is damaged or of another version."""
    if not _HEAD.size + _SEAL_BYTES <= len(data) <= _HEAD.size + MAX_SNAPSHOT_ROWS * _ROW.size + _SEAL_BYTES:
        return None
    magic, version, namespace, epoch, next_seq, milliseconds, number, count = _HEAD.unpack_from(data)
    body = data[_HEAD.size : -_SEAL_BYTES]
    if magic != _MAGIC or version != _VERSION or len(body) != count * _ROW.size:
        return None
    if _seal(data[:-_SEAL_BYTES]) != data[-_SEAL_BYTES:]:
        return None
    rows: dict[bytes, IndexRow] = {}
    for key, position, tier in _ROW.iter_unpack(body):
        if tier >= len(_TIERS) or not position or position % BLOCK_TOKENS:
            return None
        rows[key] = IndexRow(position, _TIERS[tier])
    return Snapshot(replica_id, namespace, epoch, next_seq, f"{milliseconds}-{number}", rows)


def _seal(data: bytes) -> bytes:
    seal: bytes = xxhash.xxh3_128_digest(data)
    return seal
