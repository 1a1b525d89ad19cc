"""Owns how one object lies on the server, and the blocking reads and writes of it. Knows no timeout and no thread.

A checkpoint is a HASH (one key, so the server evicts all of it or nothing): field `m` holds the manifest, one field
per chunk. A KV segment is a STRING: manifest, then payload. Every call may raise what the Redis client raises.
"""

from collections.abc import Mapping, Sequence

import redis

from warmstate.cache_store.codec import (
    Chunk,
    Corrupt,
    ForeignVersion,
    Manifest,
    chunks_of,
    decode_manifest,
    describe,
    digest_of,
    encode_manifest,
    flat_bytes,
    manifest_bytes,
    ordered_specs,
)
from warmstate.cache_store.connections import KeptConnections
from warmstate.cache_store.errors import LoanEnded
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.loan import Loan
from warmstate.cache_store.names import ROOM, object_name, temporary_name
from warmstate.cache_store.payload_stream import Argument, PayloadStream, open_stream
from warmstate.cache_store.room import give_room, take_room, want_room
from warmstate.cache_store.store import Dropped, DropReason, Exists, Miss, MissReason, Part, Ready, Stored

WINDOW_CHUNKS = 2
"""Chunks on their way at once: the next one is ready when one has been read, and the server holds few of them."""

MANIFEST_FIELD = "m"
TEMPORARY_TTL_MS = 60_000

_ABSENT = -2
_MULTI_REPLIES = 4
_RENAME_REPLIES = 6
_NOTHING = memoryview(b"")


class ObjectReader:
    """Reads one object into the caller's buffers, chunk by chunk, each verified once it has come."""

    def __init__(
        self, connections: KeptConnections, key: ObjectKey, into: Mapping[str, Part], loan: Loan, deadline: float
    ) -> None:
        self._connections = connections
        self._key = key
        self._name = object_name(key)
        self._specs = ordered_specs(into)
        self._targets = {name: flat_bytes(part) for name, part in into.items()}
        self._loan = loan
        self._deadline = deadline
        self._head_bytes = manifest_bytes(self._specs)
        self._chunks = chunks_of(self._specs)
        self.num_bytes = sum(spec.num_bytes for spec in self._specs)

    def read(self) -> Miss | None:
        """Fills the buffers; None means that the object is whole. The first chunks are asked for with the manifest."""
        with open_stream(self._connections, self._loan, self._deadline) as stream:
            stream.send(*self._head_command())
            for chunk in self._chunks[:WINDOW_CHUNKS]:
                stream.send(*self._chunk_command(chunk))
            digests = self._check_head(stream)
            return digests if isinstance(digests, Miss) else self._read_chunks(stream, digests)

    def discard(self) -> None:
        """Removes the object, so that a writer may store it again."""
        with open_stream(self._connections, self._loan, self._deadline) as stream:
            stream.ask("UNLINK", self._name)

    def _read_chunks(self, stream: PayloadStream, digests: Sequence[bytes]) -> Miss | None:
        upcoming = iter(self._chunks[WINDOW_CHUNKS:])
        for chunk, digest in zip(self._chunks, digests, strict=True):
            target = self._targets[chunk.part][chunk.start : chunk.stop]
            size = stream.read_into(target)
            if size != chunk.num_bytes:
                found = "nothing" if size is None else f"{size} bytes"
                detail = f"chunk {chunk.field}: {found} instead of {chunk.num_bytes} bytes"
                return Miss(MissReason.CORRUPT, detail, chunk.part)
            following = next(upcoming, None)
            if following is not None:
                stream.send(*self._chunk_command(following))
            if digest_of(target) != digest:
                return Miss(MissReason.CORRUPT, f"chunk {chunk.field} does not match its checksum", chunk.part)
        return None

    def _head_command(self) -> tuple[Argument, ...]:
        if self._key.kind == "ck":
            return "HGET", self._name, MANIFEST_FIELD
        return "GETRANGE", self._name, 0, self._head_bytes - 1

    def _chunk_command(self, chunk: Chunk) -> tuple[Argument, ...]:
        """Of a string one byte more is asked for with the last chunk: to get it means that the string is too long."""
        if self._key.kind == "ck":
            return "HGET", self._name, chunk.field
        start = self._head_bytes + chunk.offset
        excess = 1 if chunk is self._chunks[-1] else 0
        return "GETRANGE", self._name, start, start + chunk.num_bytes - 1 + excess

    def _check_head(self, stream: PayloadStream) -> Sequence[bytes] | Miss:
        """The digests of the chunks, once the manifest is verified."""
        data = stream.read_value()
        if not data:
            return self._why_no_head(stream)
        manifest = decode_manifest(data)
        if isinstance(manifest, Corrupt):
            return Miss(MissReason.CORRUPT, manifest.detail)
        if isinstance(manifest, ForeignVersion):
            return Miss(MissReason.LAYOUT, f"schema version {manifest.version}")
        return self._check_identity(manifest)

    def _why_no_head(self, stream: PayloadStream) -> Miss:
        while stream.num_awaited:
            if stream.read_into(_NOTHING):
                return Miss(MissReason.CORRUPT, "manifest is missing")
        exists = stream.ask("EXISTS", self._name)
        return Miss(MissReason.CORRUPT, "manifest is missing") if exists else Miss(MissReason.ABSENT)

    def _check_identity(self, manifest: Manifest) -> Sequence[bytes] | Miss:
        if manifest.key != self._key:
            return Miss(MissReason.CORRUPT, f"manifest names {manifest.key}")
        if manifest.specs != self._specs:
            return Miss(MissReason.LAYOUT, f"holds {manifest.specs}, expected {self._specs}")
        return manifest.digests


def remove_object(connections: KeptConnections, key: ObjectKey, deadline: float) -> None:
    with open_stream(connections, Loan(), deadline) as stream:
        stream.ask("UNLINK", object_name(key))


def prepare_objects(
    connections: KeptConnections,
    keys: Sequence[ObjectKey],
    loan: Loan,
    deadline: float,
    ttl_ms: int,
    least_room: int | None,
) -> Ready | Dropped:
    """Gives objects this time to live, unless theirs is longer, and asks for `least_room` bytes, in one round trip."""
    with open_stream(connections, loan, deadline) as stream:
        stream.send("GET", ROOM)
        for key in keys:
            stream.send("PEXPIRE", object_name(key), ttl_ms, "GT")
            stream.send("PTTL", object_name(key))
        room = stream.read_value()
        left_ms = [(stream.read_number(), stream.read_number())[1] for _ in keys]
        if least_room is not None and room is not None and int(room) < least_room:
            want_room(stream, least_room)
            return Dropped(DropReason.NO_ROOM, f"{least_room} bytes, and the budget has room for {int(room)}")
    return Ready(tuple(key for key, left in zip(keys, left_ms, strict=True) if left == _ABSENT))


class ObjectWriter:
    """Publishes one object: all of it becomes visible at once, or nothing of it does."""

    def __init__(
        self,
        connections: KeptConnections,
        key: ObjectKey,
        parts: Mapping[str, Part],
        loan: Loan,
        deadline: float,
        epoch: int,
        ttl_ms: int,
        budget_bytes: int | None = None,
    ) -> None:
        self._connections = connections
        self._key = key
        self._name = object_name(key)
        self._parts = parts
        self._loan = loan
        self._deadline = deadline
        self._epoch = epoch
        self._ttl_ms = ttl_ms
        self._budget_bytes = budget_bytes

    def publish(self) -> Stored | Exists | Dropped:
        """Writes the object unless it exists; an existing one gets the time to live again, and keeps a longer one."""
        try:
            with open_stream(self._connections, self._loan, self._deadline) as stream:
                if self._renew(stream):
                    return Exists()
                return self._publish_within_budget(stream)
        except LoanEnded as error:
            return Dropped(DropReason.TIMEOUT, str(error))

    def _publish_within_budget(self, stream: PayloadStream) -> Stored | Exists | Dropped:
        manifest = describe(self._key, self._parts, self._epoch)
        publish = self._publish_hash if self._key.kind == "ck" else self._publish_string
        if self._budget_bytes is None:
            return publish(stream, manifest)
        num_bytes = sum(part.spec.num_bytes for part in self._parts.values())
        if not take_room(stream, num_bytes, self._budget_bytes):
            return Dropped(DropReason.NO_ROOM, f"{num_bytes} bytes would pass the budget of {self._budget_bytes}")
        outcome = publish(stream, manifest)
        if not isinstance(outcome, Stored):
            give_room(stream, num_bytes)
        return outcome

    def _renew(self, stream: PayloadStream) -> bool:
        """Whether the object is there, with our time to live or a longer one."""
        left_ms = stream.ask("PTTL", self._name)
        return left_ms >= self._ttl_ms or (left_ms != _ABSENT and stream.ask("PEXPIRE", self._name, self._ttl_ms) == 1)

    def _payload(self, manifest: Manifest) -> list[tuple[str, memoryview]]:
        views = {name: flat_bytes(part) for name, part in self._parts.items()}
        return [(chunk.field, views[chunk.part][chunk.start : chunk.stop]) for chunk in chunks_of(manifest.specs)]

    def _publish_string(self, stream: PayloadStream, manifest: Manifest) -> Stored | Exists | Dropped:
        """One command is atomic by itself, and gives the server the exact size: no temporary is needed."""
        value = [memoryview(encode_manifest(manifest)), *(data for _, data in self._payload(manifest))]
        stream.send("SET", self._name, value, "PX", self._ttl_ms, "NX")
        stored = stream.read_value()
        return Stored(sum(len(piece) for piece in value)) if stored else Exists()

    def _publish_hash(self, stream: PayloadStream, manifest: Manifest) -> Stored | Exists | Dropped:
        temporary = temporary_name(self._key)
        fields = [(MANIFEST_FIELD, memoryview(encode_manifest(manifest))), *self._payload(manifest)]
        error = self._fill(stream, temporary, fields)
        if error is None:
            outcome = self._rename(stream, temporary, fields)
            if isinstance(outcome, Stored):
                return outcome
        stream.ask("UNLINK", temporary)
        if error is not None:
            raise error
        return outcome

    def _fill(
        self, stream: PayloadStream, temporary: str, fields: Sequence[tuple[str, memoryview]]
    ) -> redis.RedisError | None:
        """Writes the fields, a window of them on their way at once; the first error ends it."""
        errors: list[redis.RedisError] = []
        num_open = 0
        for field, data in fields:
            if num_open == WINDOW_CHUNKS:
                errors += _read_errors(stream)
                num_open -= 1
            if errors:
                break
            self._send_field(stream, temporary, field, data)
            num_open += 1
        for _ in range(num_open):
            errors += _read_errors(stream)
        return errors[0] if errors else None

    def _send_field(self, stream: PayloadStream, temporary: str, field: str, data: memoryview) -> None:
        """The expiry rides along with every field: no moment exists at which a temporary would stay for ever."""
        stream.send("MULTI")
        stream.send("HSET", temporary, field, [data])
        stream.send("PEXPIRE", temporary, TEMPORARY_TTL_MS)
        stream.send("EXEC")

    def _rename(
        self, stream: PayloadStream, temporary: str, fields: Sequence[tuple[str, memoryview]]
    ) -> Stored | Exists | Dropped:
        """RENAMENX keeps the expiry, which is therefore set before it; no winner's object lives shorter for a loser."""
        # An eviction between two chunks would have left a hash that holds only the later ones.
        if stream.ask("HLEN", temporary) != len(fields):
            return Dropped(DropReason.NO_ROOM, "the server evicted the object while it was written")
        stream.send("MULTI")
        stream.send("PEXPIRE", temporary, self._ttl_ms)
        stream.send("RENAMENX", temporary, self._name)
        stream.send("PEXPIRE", self._name, self._ttl_ms, "GT")
        # Of the loser, which may die before it removes what it wrote for nothing.
        stream.send("PEXPIRE", temporary, TEMPORARY_TTL_MS)
        stream.send("EXEC")
        *_, results = [stream.read_reply() for _ in range(_RENAME_REPLIES)]
        if isinstance(results, redis.RedisError):
            raise results
        renamed = results[1] if isinstance(results, list) and len(results) > 1 else None
        if isinstance(renamed, redis.RedisError):
            return Dropped(DropReason.NO_ROOM, f"the server evicted the object while it was written: {renamed}")
        return Stored(sum(len(data) for _, data in fields)) if renamed else Exists()


def _read_errors(stream: PayloadStream) -> list[redis.RedisError]:
    """Reads the replies of one transaction, and returns the errors among them, the first cause first."""
    replies = [stream.read_reply() for _ in range(_MULTI_REPLIES)]
    results = replies[-1] if isinstance(replies[-1], list) else []
    return [reply for reply in (*replies, *results) if isinstance(reply, redis.RedisError)]
