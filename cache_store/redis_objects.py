"""Owns how one object lies on the server, and the blocking reads and writes of it. Knows no timeout and no thread.

A checkpoint is a HASH (one key, so the server evicts all of it or nothing): field `m` holds the manifest, one field
per chunk. A KV segment is a STRING: manifest, then payload. Every call may raise what the Redis client raises.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import redis

from warmstate.cache_store.codec import (
    CHUNK_BYTES,
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
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.names import object_name, temporary_name
from warmstate.cache_store.store import Dropped, DropReason, Exists, Miss, MissReason, Part, Stored

WINDOW_CHUNKS = 4
"""Chunks per read command: bounds what one reply may hold in memory."""

MANIFEST_FIELD = "m"
TEMPORARY_TTL_MS = 60_000

# What PTTL says of a name that is not there.
_ABSENT = -2


class Loan:
    """The caller's buffers, lent until the call returns: a thread that comes back later finds the loan closed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open = True

    @property
    def is_open(self) -> bool:
        return self._open

    def write(self, target: memoryview, data: memoryview) -> None:
        with self._lock:
            if self._open:
                target[:] = data

    def close(self) -> None:
        with self._lock:
            self._open = False


@dataclass(frozen=True, slots=True)
class Head:
    """A verified manifest: the digest of every chunk, in the order of `ObjectReader.chunks`."""

    digests: tuple[bytes, ...]


class ObjectReader:
    """Reads one object into the caller's buffers, window by window. Windows may be read by several threads."""

    def __init__(self, client: redis.Redis, key: ObjectKey, into: Mapping[str, Part], loan: Loan) -> None:
        self._client = client
        self._key = key
        self._name = object_name(key)
        self._specs = ordered_specs(into)
        self._targets = {name: flat_bytes(part) for name, part in into.items()}
        self._loan = loan
        self._head_bytes = manifest_bytes(self._specs)
        self._chunks = chunks_of(self._specs)
        self.num_bytes = sum(spec.num_bytes for spec in self._specs)

    def windows(self) -> list[list[Chunk]]:
        """The chunks in windows of at most `WINDOW_CHUNKS`, and in at least two windows so that two threads share."""
        size = min(WINDOW_CHUNKS, max(1, -(-len(self._chunks) // 2)))
        return [self._chunks[start : start + size] for start in range(0, len(self._chunks), size)]

    def read_small(self) -> Miss | None:
        """Reads an object of at most one chunk's bytes in one round trip. None means that it is whole."""
        found, *payload = self._fetch_with_head(self._chunks)
        head = self._check_head(found)
        return head if isinstance(head, Miss) else self._take(self._chunks, payload, head)

    def read_head(self) -> Head | Miss:
        """Reads and verifies the manifest alone."""
        return self._check_head(self._fetch_with_head([])[0])

    def read_window(self, window: Sequence[Chunk], head: Head) -> Miss | None:
        """Reads, verifies and copies these chunks. None means that they are whole."""
        return self._take(window, self._fetch(window), head)

    @property
    def is_small(self) -> bool:
        return self.num_bytes <= CHUNK_BYTES

    def discard(self) -> None:
        """Removes the object, so that a writer may store it again."""
        self._client.unlink(self._name)

    def _fetch_with_head(self, chunks: Sequence[Chunk]) -> list[memoryview | None]:
        if self._key.kind == "ck":
            return self._fetch_fields([MANIFEST_FIELD, *(chunk.field for chunk in chunks)])
        size = self._head_bytes + sum(chunk.num_bytes for chunk in chunks)
        data = self._fetch_range(0, size + self._excess(chunks))
        head = data[: self._head_bytes] if data.nbytes else None
        return [head, *self._cut(data[self._head_bytes :], chunks)]

    def _fetch(self, chunks: Sequence[Chunk]) -> list[memoryview | None]:
        if self._key.kind == "ck":
            return self._fetch_fields([chunk.field for chunk in chunks])
        size = sum(chunk.num_bytes for chunk in chunks) + self._excess(chunks)
        return self._cut(self._fetch_range(self._head_bytes + chunks[0].offset, size), chunks)

    def _fetch_fields(self, fields: Sequence[str]) -> list[memoryview | None]:
        values = self._client.hmget(self._name, list(fields))
        return [None if value is None else _view_of(value) for value in values]

    def _fetch_range(self, start: int, size: int) -> memoryview:
        return _view_of(self._client.getrange(self._name, start, start + size - 1))

    def _excess(self, chunks: Sequence[Chunk]) -> int:
        """With the last chunk one byte more is asked for: to get it means that the string is too long."""
        return 1 if chunks and chunks[-1] is self._chunks[-1] else 0

    @staticmethod
    def _cut(data: memoryview, chunks: Sequence[Chunk]) -> list[memoryview | None]:
        """Cuts a range into its chunks; the last one keeps any excess, so that its size gives it away."""
        pieces: list[memoryview | None] = []
        for number, chunk in enumerate(chunks, start=1):
            pieces.append(data if number == len(chunks) else data[: chunk.num_bytes])
            data = data[chunk.num_bytes :]
        return pieces

    def _check_head(self, data: memoryview | None) -> Head | Miss:
        if data is None:
            exists = self._client.exists(self._name)
            return Miss(MissReason.CORRUPT, "manifest is missing") if exists else Miss(MissReason.ABSENT)
        manifest = decode_manifest(bytes(data))
        if isinstance(manifest, Corrupt):
            return Miss(MissReason.CORRUPT, manifest.detail)
        if isinstance(manifest, ForeignVersion):
            return Miss(MissReason.LAYOUT, f"schema version {manifest.version}")
        return self._check_identity(manifest)

    def _check_identity(self, manifest: Manifest) -> Head | Miss:
        if manifest.key != self._key:
            return Miss(MissReason.CORRUPT, f"manifest names {manifest.key}")
        if manifest.specs != self._specs:
            return Miss(MissReason.LAYOUT, f"holds {manifest.specs}, expected {self._specs}")
        return Head(manifest.digests)

    def _take(self, window: Sequence[Chunk], payload: Sequence[memoryview | None], head: Head) -> Miss | None:
        first = self._chunks.index(window[0]) if window else 0
        for chunk, data, digest in zip(window, payload, head.digests[first:], strict=False):
            if data is None or data.nbytes != chunk.num_bytes:
                found = "nothing" if data is None else f"{data.nbytes} bytes"
                return Miss(MissReason.CORRUPT, f"chunk {chunk.field}: {found} instead of {chunk.num_bytes} bytes")
            if digest_of(data) != digest:
                return Miss(MissReason.CORRUPT, f"chunk {chunk.field} does not match its checksum")
            self._loan.write(self._targets[chunk.part][chunk.start : chunk.stop], data)
        return None


class ObjectWriter:
    """Publishes one object: all of it becomes visible at once, or nothing of it does."""

    def __init__(
        self, client: redis.Redis, key: ObjectKey, parts: Mapping[str, Part], loan: Loan, epoch: int, ttl_ms: int
    ) -> None:
        self._client = client
        self._key = key
        self._name = object_name(key)
        self._parts = parts
        self._loan = loan
        self._epoch = epoch
        self._ttl_ms = ttl_ms

    def publish(self) -> Stored | Exists | Dropped:
        """Writes the object unless it exists; an existing one gets the full time to live again, never less."""
        if self._renew():
            return Exists()
        manifest = describe(self._key, self._parts, self._epoch)
        return self._publish_hash(manifest) if self._key.kind == "ck" else self._publish_string(manifest)

    def _renew(self) -> bool:
        """Whether the object is there, with our time to live or a longer one."""
        left_ms = self._client.pttl(self._name)
        return left_ms >= self._ttl_ms or (left_ms != _ABSENT and bool(self._client.pexpire(self._name, self._ttl_ms)))

    def _payload(self, manifest: Manifest) -> Iterator[tuple[str, memoryview]]:
        views = {name: flat_bytes(part) for name, part in self._parts.items()}
        for chunk in chunks_of(manifest.specs):
            yield chunk.field, views[chunk.part][chunk.start : chunk.stop]

    def _publish_string(self, manifest: Manifest) -> Stored | Exists | Dropped:
        """One command is atomic by itself, and gives the server the exact size: no temporary is needed."""
        value = b"".join([encode_manifest(manifest), *(data for _, data in self._payload(manifest))])
        if not self._loan.is_open:
            return _came_too_late()
        stored = self._client.set(self._name, value, px=self._ttl_ms, nx=True)
        return Stored(len(value)) if stored else Exists()

    def _publish_hash(self, manifest: Manifest) -> Stored | Exists | Dropped:
        temporary = temporary_name(self._key)
        try:
            outcome = self._fill_and_rename(manifest, temporary)
        except redis.ResponseError:
            self._client.unlink(temporary)
            raise
        if not isinstance(outcome, Stored):
            self._client.unlink(temporary)
        return outcome

    def _fill_and_rename(self, manifest: Manifest, temporary: str) -> Stored | Exists | Dropped:
        head = encode_manifest(manifest)
        self._add_field(temporary, MANIFEST_FIELD, head)
        num_bytes, num_fields = len(head), 1
        for field, data in self._payload(manifest):
            if not self._loan.is_open:
                return _came_too_late()
            self._add_field(temporary, field, data)
            num_bytes, num_fields = num_bytes + len(data), num_fields + 1
        # An eviction between two chunks would have left a hash that holds only the later ones.
        if self._client.hlen(temporary) != num_fields:
            return Dropped(DropReason.NO_ROOM, "the server evicted the object while it was written")
        if not self._loan.is_open:
            return _came_too_late()
        return self._rename(temporary, num_bytes)

    def _add_field(self, temporary: str, field: str, data: bytes | memoryview) -> None:
        """The expiry rides along with every field: no moment exists at which a temporary would stay for ever."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hset(temporary, field, data)
        pipeline.pexpire(temporary, TEMPORARY_TTL_MS)
        pipeline.execute()

    def _rename(self, temporary: str, num_bytes: int) -> Stored | Exists | Dropped:
        """RENAMENX keeps the short expiry, hence the second command; no winner's object lives shorter for it."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.renamenx(temporary, self._name)
        pipeline.pexpire(self._name, self._ttl_ms, gt=True)
        renamed, _ = pipeline.execute(raise_on_error=False)
        if isinstance(renamed, redis.ResponseError):
            return Dropped(DropReason.NO_ROOM, f"the server evicted the object while it was written: {renamed}")
        return Stored(num_bytes) if renamed else Exists()


def _came_too_late() -> Dropped:
    return Dropped(DropReason.TIMEOUT, "the caller had taken its buffers back")


def _view_of(value: bytes | str) -> memoryview:
    assert isinstance(value, bytes), "the client does not decode replies"
    return memoryview(value)
