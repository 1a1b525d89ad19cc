"""Owns the check of one stored object against its own manifest, for people: whole or what is wrong with it.

Reads chunk by chunk and never more than a chunk at once, whatever the server holds. Calls raise the client's errors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import redis

from warmstate.cache_store.codec import (
    CHUNK_BYTES,
    Chunk,
    Corrupt,
    ForeignVersion,
    Manifest,
    chunks_of,
    decode_manifest,
    digest_of,
    manifest_size,
)
from warmstate.cache_store.names import ObjectName
from warmstate.cache_store.redis_objects import MANIFEST_FIELD

MAX_MANIFEST_BYTES = 1 << 20

_ENVELOPE_BYTES = 10


@dataclass(frozen=True, slots=True)
class ObjectReport:
    """What one object holds, and every way in which it is not whole; `ttl_s` None: it does not expire."""

    name: str
    num_bytes: int
    ttl_s: float | None
    position: int | None
    epoch: int | None
    parts: dict[str, str]
    problems: list[str]


def check_object(client: redis.Redis, name: ObjectName) -> ObjectReport:
    """Reads and verifies every byte of an object; an absent one has the problem that it is absent."""
    key = str(name)
    kind, expected = cast(bytes, client.type(key)).decode(), "hash" if name.kind == "ck" else "string"
    if kind != expected:
        problem = "absent" if kind == "none" else f"a {kind}, not a {expected}"
        return ObjectReport(key, 0, None, None, None, {}, [problem])
    ttl_ms = client.pttl(key)
    ttl_s = ttl_ms / 1000 if ttl_ms >= 0 else None
    return _check_hash(client, name, ttl_s) if expected == "hash" else _check_string(client, name, ttl_s)


def _check_hash(client: redis.Redis, name: ObjectName, ttl_s: float | None) -> ObjectReport:
    key = str(name)
    num_bytes = client.hstrlen(key, MANIFEST_FIELD)
    if num_bytes > MAX_MANIFEST_BYTES:
        return ObjectReport(key, num_bytes, ttl_s, None, None, {}, [f"manifest of {num_bytes} bytes"])
    data = cast(bytes | None, client.hget(key, MANIFEST_FIELD))
    manifest = decode_manifest(data) if data is not None else Corrupt("manifest is missing")
    if not isinstance(manifest, Manifest):
        return ObjectReport(key, num_bytes, ttl_s, None, None, {}, [_why(manifest)])
    chunks = chunks_of(manifest.specs)

    def read(chunk: Chunk) -> bytes | str:
        size = client.hstrlen(key, chunk.field)
        if size != chunk.num_bytes:
            return f"{size} bytes instead of {chunk.num_bytes}"
        return cast(bytes | None, client.hget(key, chunk.field)) or b""

    problems = _check_identity(name, manifest) + _check_chunks(manifest, chunks, read)
    surplus = client.hlen(key) - len(chunks) - 1
    if surplus > 0:
        problems.append(f"{surplus} fields that the manifest does not name")
    return _report(key, manifest, num_bytes, ttl_s, problems)


def _check_string(client: redis.Redis, name: ObjectName, ttl_s: float | None) -> ObjectReport:
    key = str(name)
    num_bytes = client.strlen(key)
    head_bytes = manifest_size(_range(client, key, 0, _ENVELOPE_BYTES))
    if head_bytes is None or head_bytes > min(MAX_MANIFEST_BYTES, num_bytes):
        return ObjectReport(key, num_bytes, ttl_s, None, None, {}, ["no manifest at its beginning"])
    manifest = decode_manifest(_range(client, key, 0, head_bytes))
    if not isinstance(manifest, Manifest):
        return ObjectReport(key, num_bytes, ttl_s, None, None, {}, [_why(manifest)])
    chunks = chunks_of(manifest.specs)
    problems = _check_identity(name, manifest) + _check_chunks(
        manifest, chunks, lambda chunk: _range(client, key, head_bytes + chunk.offset, chunk.num_bytes)
    )
    expected = head_bytes + sum(chunk.num_bytes for chunk in chunks)
    if num_bytes != expected:
        problems.append(f"{num_bytes} bytes instead of {expected}")
    return _report(key, manifest, head_bytes, ttl_s, problems)


def _check_identity(name: ObjectName, manifest: Manifest) -> list[str]:
    key = manifest.key
    named = ObjectName(key.namespace[:8].hex(), key.prefix, key.group, key.kind)
    return [] if named == name else [f"manifest names {named}"]


def _check_chunks(manifest: Manifest, chunks: list[Chunk], read: Callable[[Chunk], bytes | str]) -> list[str]:
    """`read` gives a chunk's bytes, or what is wrong with them."""
    problems: list[str] = []
    for chunk, digest in zip(chunks, manifest.digests, strict=True):
        data = read(chunk)
        if isinstance(data, str):
            problems.append(f"chunk {chunk.field}: {data}")
        elif len(data) != chunk.num_bytes:
            problems.append(f"chunk {chunk.field}: {len(data)} bytes instead of {chunk.num_bytes}")
        elif digest_of(data) != digest:
            problems.append(f"chunk {chunk.field} does not match its checksum")
    return problems


def _report(key: str, manifest: Manifest, head_bytes: int, ttl_s: float | None, problems: list[str]) -> ObjectReport:
    parts = {spec.name: f"{spec.dtype}{list(spec.shape)}" for spec in manifest.specs}
    num_bytes = head_bytes + sum(spec.num_bytes for spec in manifest.specs)
    return ObjectReport(key, num_bytes, ttl_s, manifest.key.position, manifest.epoch, parts, problems)


def _range(client: redis.Redis, key: str, start: int, size: int) -> bytes:
    assert size <= max(CHUNK_BYTES, MAX_MANIFEST_BYTES)
    return cast(bytes, client.getrange(key, start, start + size - 1)) if size else b""


def _why(found: Corrupt | ForeignVersion) -> str:
    return found.detail if isinstance(found, Corrupt) else f"written in schema version {found.version}"
