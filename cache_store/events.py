"""Owns what replicas tell of the prefixes they can serve, and its form in a stream. Knows no server and no thread.

`seq` grows by one per entry of a replica and epoch, so that a reader sees a gap. What the shared store holds is told
with tier "store" and belongs to the holder `STORE_HOLDER`, whoever wrote it.

That KV segments are gone from the store is told by entries of another form, without a number: whoever takes them for
there leaves them out of what it puts. Whoever only asks which prefixes are usable passes them over.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from warmstate.cache_store.keys import BLOCK_TOKENS, KEY_BYTES, split_keys
from warmstate.cache_store.prefix_index import STORE_HOLDER, Tier

_OPS: Mapping[bytes, Literal["add", "remove"]] = {b"add": "add", b"remove": "remove"}
_TIERS: Mapping[bytes, Tier] = {b"device": "device", b"host": "host", b"store": "store"}


@dataclass(frozen=True, slots=True)
class PrefixEvent:
    """A prefix became usable ("add") or stopped being so ("remove") at a replica or in the store."""

    op: Literal["add", "remove"]
    key: bytes
    position: int
    tier: Tier

    @property
    def is_of_store(self) -> bool:
        return self.tier == "store"


@dataclass(frozen=True, slots=True)
class EventEntry:
    """An event as it lies in the stream: who said it, in which life, and as its how-manieth."""

    replica_id: str
    epoch: int
    seq: int
    event: PrefixEvent

    @property
    def holder(self) -> str:
        return STORE_HOLDER if self.event.is_of_store else self.replica_id

    def encode(self) -> dict[str, str | int | bytes]:
        event = self.event
        return {
            "r": self.replica_id,
            "e": self.epoch,
            "s": self.seq,
            "o": event.op,
            "h": event.key,
            "p": event.position,
            "t": event.tier,
        }


def decode_entry(fields: Mapping[bytes, bytes]) -> EventEntry | None:
    """None for an entry that is not of this version, or names what cannot be a prefix."""
    try:
        event = PrefixEvent(_OPS[fields[b"o"]], fields[b"h"], int(fields[b"p"]), _TIERS[fields[b"t"]])
        entry = EventEntry(fields[b"r"].decode(), int(fields[b"e"]), int(fields[b"s"]), event)
    except (KeyError, ValueError):
        return None
    return entry if event.position > 0 and event.position % BLOCK_TOKENS == 0 else None


def encode_lost_segments(keys: Iterable[bytes]) -> dict[str, bytes]:
    """An entry that tells of which prefix keys the store no longer holds the KV segment."""
    return {"lost": b"".join(keys)}


def decode_lost_segments(fields: Mapping[bytes, bytes]) -> list[bytes]:
    """The prefix keys whose KV segments an entry says are lost; none for one of another form."""
    joined = fields.get(b"lost", b"")
    return [] if len(joined) % KEY_BYTES else split_keys(joined)
