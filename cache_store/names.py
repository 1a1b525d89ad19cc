"""Owns the spelling of every name this package uses on a Redis-protocol server.

Names carry a hash tag in braces, so that what one transaction touches shares a slot when the server is a cluster: an
object and its temporary, and all that is indexed of one namespace. Objects are PAYLOAD, all else is INDEX.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Literal

from warmstate.cache_store.keys import ObjectKey

REPLICA_IDS = "ws:reps"
"""Set of the ids of replicas that wrote a row; a row that expired is no longer a replica."""

NAMESPACES = "ws:nss"
"""Hash of the namespaces in use: short name -> full digest in hex, a space, and when a replica last said so, in ms."""

LEASE = "ws:{lease}:holder"
"""Who may evict, as long as the name exists."""

LEASE_TOKENS = "ws:{lease}:tokens"
"""Counts the attempts to become the holder; see `lease.py`."""

ROOM = "ws:{room}:bytes"
"""How many bytes may be put before the holder of the lease counts again; see `room.py`."""

WANTED_ROOM = "ws:{room}:wanted"
"""How many bytes a writer has lately asked for in vain; see `room.py`."""

ALL_OBJECTS = "ws:{*.*.*}:*"
"""The SCAN pattern of all objects of all namespaces."""

_SHORT_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_OBJECT = re.compile(r"ws:\{([0-9a-f]{16})\.([0-9a-f]{64})\.(\d{1,6})\}:(ck|kv|tmp:[0-9a-f]{16})")
_INDEX = re.compile(r"ws:([a-z]+):\{[0-9a-f]{16}\}")

_ONES = {
    REPLICA_IDS: "the replicas that wrote a row",
    NAMESPACES: "the namespaces in use",
    LEASE: "who may evict",
    LEASE_TOKENS: "how often somebody tried to become the one that evicts",
    ROOM: "bytes that may be put before they are counted anew",
    WANTED_ROOM: "bytes that were asked for in vain",
}
_OF_NAMESPACES = {
    "ix": "rows of checkpoints",
    "sg": "rows of KV segments",
    "hits": "how often checkpoints were fetched",
    "use": "when checkpoints were last fetched",
    "ev": "events",
    "path": "paths to stored checkpoints",
    "live": "replicas that tell of events",
    "fence": "who last worked on the namespace",
    "cost": "milliseconds that a token takes to compute",
}


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What the name of a payload key tells; kind "tmp" is an object that is still being written."""

    short_namespace: str
    prefix: bytes
    group: int
    kind: Literal["ck", "kv", "tmp"]

    def __str__(self) -> str:
        """The name; of a temporary only what it begins with."""
        return f"ws:{{{self.short_namespace}.{self.prefix.hex()}.{self.group}}}:{self.kind}"


def short_namespace(namespace: bytes) -> str:
    """The first 8 bytes in hex: enough to keep names apart, while the manifest holds all 32 and decides."""
    return namespace[:8].hex()


def is_short_namespace(text: str) -> bool:
    return _SHORT_NAMESPACE.fullmatch(text) is not None


def object_name(key: ObjectKey) -> str:
    return f"ws:{{{_object_tag(key)}}}:{key.kind}"


def temporary_name(key: ObjectKey) -> str:
    """A name no other writer uses, in the same hash slot as the object."""
    return f"ws:{{{_object_tag(key)}}}:tmp:{secrets.token_hex(8)}"


def parse_object_name(name: str) -> ObjectName | None:
    """None for a name that is no object's."""
    found = _OBJECT.fullmatch(name)
    if found is None:
        return None
    namespace, prefix, group, kind = found.groups()
    known: Literal["ck", "kv", "tmp"] = "ck" if kind == "ck" else "kv" if kind == "kv" else "tmp"
    return ObjectName(namespace, bytes.fromhex(prefix), int(group), known)


def describe_name(name: str) -> str | None:
    """What a key of ours is for, in words; None for a name that is none of ours."""
    parsed, found = parse_object_name(name), _INDEX.fullmatch(name)
    if parsed is not None:
        kinds = {"ck": "a head group of a checkpoint", "kv": "a KV segment", "tmp": "an object that is being written"}
        return kinds[parsed.kind]
    if found is not None:
        return _OF_NAMESPACES.get(found[1])
    for start, meaning in ((replica_row_name(""), "a replica's row"), (snapshot_name(""), "a replica's snapshot")):
        if name.startswith(start):
            return meaning
    return _ONES.get(name)


def objects_pattern(short: str) -> str:
    """The SCAN pattern of all objects of a namespace, temporaries included."""
    return f"ws:{{{short}.*"


@dataclass(frozen=True, slots=True)
class IndexNames:
    """The names of what is indexed of one namespace; all of them in one slot."""

    short: str

    @property
    def checkpoints(self) -> str:
        """Hash: prefix key -> `index_rows.StoredCheckpoint`."""
        return f"ws:ix:{{{self.short}}}"

    @property
    def segments(self) -> str:
        """Hash: prefix key at the segment's end -> `index_rows.StoredSegment`."""
        return f"ws:sg:{{{self.short}}}"

    @property
    def hits(self) -> str:
        """Hash: prefix key -> how often its checkpoint was fetched."""
        return f"ws:hits:{{{self.short}}}"

    @property
    def uses(self) -> str:
        """Hash: prefix key -> when its checkpoint was last fetched, in ms."""
        return f"ws:use:{{{self.short}}}"

    @property
    def events(self) -> str:
        """Stream of `events.EventEntry` and of lost KV segments."""
        return f"ws:ev:{{{self.short}}}"

    @property
    def paths(self) -> str:
        """Stream of `known_paths.encode_path`."""
        return f"ws:path:{{{self.short}}}"

    @property
    def replicas(self) -> str:
        """Set of the ids of replicas that write to the stream; each also has a snapshot while it lives."""
        return f"ws:live:{{{self.short}}}"

    @property
    def fence(self) -> str:
        """The highest lease token that has worked on this namespace."""
        return f"ws:fence:{{{self.short}}}"

    @property
    def cost(self) -> str:
        """Milliseconds that a token takes to compute; see `compute_costs.py`."""
        return f"ws:cost:{{{self.short}}}"

    def all(self) -> tuple[str, ...]:
        rows = (self.checkpoints, self.segments, self.hits, self.uses)
        return (*rows, self.events, self.paths, self.replicas, self.fence, self.cost)


def index_names(namespace: bytes) -> IndexNames:
    return IndexNames(short_namespace(namespace))


def checkpoint_names(names: IndexNames, key: bytes, num_groups: int) -> list[str]:
    """The objects of a checkpoint."""
    return [str(ObjectName(names.short, key, group, "ck")) for group in range(num_groups)]


def segment_name(names: IndexNames, key: bytes) -> str:
    return str(ObjectName(names.short, key, 0, "kv"))


def events_name(namespace: bytes) -> str:
    return index_names(namespace).events


def replica_row_name(replica_id: str) -> str:
    return f"ws:rep:{replica_id}"


def snapshot_name(replica_id: str) -> str:
    return f"ws:snap:{replica_id}"


def _object_tag(key: ObjectKey) -> str:
    return f"{short_namespace(key.namespace)}.{key.prefix.hex()}.{key.group}"
