"""Owns the spelling of every name this package uses on a Redis-protocol server.

Objects carry a hash tag in braces, so that an object and its temporary share a slot when the server is a cluster.
"""

import secrets

from warmstate.cache_store.keys import ObjectKey

REPLICA_IDS = "ws:reps"
"""Set of the ids of replicas that wrote a row; a row that expired is no longer a replica."""


def short_namespace(namespace: bytes) -> str:
    """The first 8 bytes in hex: enough to keep names apart, while the manifest holds all 32 and decides."""
    return namespace[:8].hex()


def object_name(key: ObjectKey) -> str:
    return f"ws:{{{_object_tag(key)}}}:{key.kind}"


def temporary_name(key: ObjectKey) -> str:
    """A name no other writer uses, in the same hash slot as the object."""
    return f"ws:{{{_object_tag(key)}}}:tmp:{secrets.token_hex(8)}"


def events_name(namespace: bytes) -> str:
    return f"ws:ev:{short_namespace(namespace)}"


def replica_row_name(replica_id: str) -> str:
    return f"ws:rep:{replica_id}"


def _object_tag(key: ObjectKey) -> str:
    return f"{short_namespace(key.namespace)}.{key.prefix.hex()}.{key.group}"
