"""Owns the stored form of an object: a manifest that describes and seals it, and the cut into checksummed chunks.

Knows no server. Nothing is allocated from a size that was read: a reader compares the manifest with what it expects.
Layout of a manifest (little-endian), identical for the field `m` of a hash and for the head of a KV segment string:

    envelope  magic 4s | schema version u16 | number of bytes after the envelope, seal included u32
    body      kind 2s | namespace 32s | prefix 32s | position u64 | group u32 | writer epoch u64 | chunk bytes u32
    parts     count u16, then per part in name order: name, dtype (u8 length, bytes) | rank u8 | dims u64...
    digests   xxh3_128 of every chunk, in part order
    seal      xxh3_128 of all bytes before it
The envelope and the seal stay the same in every schema version, so that "another version" is told from "damaged".
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.store import DTYPE_BYTES, Part, PartSpec

CHUNK_BYTES = 1 << 20
"""Bytes per chunk: the unit of transfer and of checksums."""

SCHEMA_VERSION = 1

_MAGIC = b"WSOB"
_ENVELOPE = struct.Struct("<4sHI")
_BODY = struct.Struct("<2s32s32sQIQI")
_COUNT = struct.Struct("<H")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [start, stop) of the part `part`; `offset` is where they lie when all parts are laid end to end."""

    part: str
    index: int
    start: int
    stop: int
    offset: int

    @property
    def field(self) -> str:
        """The field of a hash that holds these bytes."""
        return f"{self.part}.{self.index}"

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an object holds: its identity, its parts in name order, and the digest of every chunk."""

    key: ObjectKey
    epoch: int
    specs: tuple[PartSpec, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The bytes are not what a writer of ours produced."""

    detail: str


@dataclass(frozen=True, slots=True)
class ForeignVersion:
    """A whole manifest of a schema version that we do not read."""

    version: int


def ordered_specs(parts: Mapping[str, Part]) -> tuple[PartSpec, ...]:
    """The specs in the order in which parts are stored."""
    return tuple(parts[name].spec for name in sorted(parts))


def chunks_of(specs: Iterable[PartSpec]) -> list[Chunk]:
    """Cuts every part into chunks of at most `CHUNK_BYTES`; a chunk never holds two parts, an empty part has none."""
    chunks: list[Chunk] = []
    offset = 0
    for spec in specs:
        for index, start in enumerate(range(0, spec.num_bytes, CHUNK_BYTES)):
            stop = min(start + CHUNK_BYTES, spec.num_bytes)
            chunks.append(Chunk(spec.name, index, start, stop, offset + start))
        offset += spec.num_bytes
    return chunks


def flat_bytes(part: Part) -> memoryview:
    """The part's buffer as a one-dimensional view of bytes, not copied."""
    return part.data.cast("B") if part.data.nbytes else memoryview(b"")


def digest_of(data: memoryview | bytes) -> bytes:
    """xxh3_128: it finds damage, and does not defend against a writer who means harm."""
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


def describe(key: ObjectKey, parts: Mapping[str, Part], epoch: int) -> Manifest:
    """The manifest of these parts; reads every byte once and copies none."""
    specs = ordered_specs(parts)
    views = {name: flat_bytes(part) for name, part in parts.items()}
    digests = tuple(digest_of(views[chunk.part][chunk.start : chunk.stop]) for chunk in chunks_of(specs))
    return Manifest(key, epoch, specs, digests)


def manifest_bytes(specs: Sequence[PartSpec]) -> int:
    """Encoded size, which depends on the specs alone: a reader knows where the payload of a string starts."""
    parts = sum(len(_encode_spec(spec)) for spec in specs)
    digests = _DIGEST_BYTES * len(chunks_of(specs))
    return _ENVELOPE.size + _BODY.size + _COUNT.size + parts + digests + _DIGEST_BYTES


def manifest_size(start: bytes) -> int | None:
    """How long the manifest is that begins with these bytes, by its own word; None when no manifest begins so."""
    if len(start) < _ENVELOPE.size:
        return None
    magic, _, num_rest = _ENVELOPE.unpack_from(start)
    return _ENVELOPE.size + int(num_rest) if magic == _MAGIC else None


def encode_manifest(manifest: Manifest, schema_version: int = SCHEMA_VERSION) -> bytes:
    key = manifest.key
    body = _BODY.pack(
        key.kind.encode(), key.namespace, key.prefix, key.position, key.group, manifest.epoch, CHUNK_BYTES
    )
    parts = b"".join(_encode_spec(spec) for spec in manifest.specs)
    content = body + _COUNT.pack(len(manifest.specs)) + parts + b"".join(manifest.digests)
    envelope = _ENVELOPE.pack(_MAGIC, schema_version, len(content) + _DIGEST_BYTES)
    return envelope + content + digest_of(envelope + content)


def decode_manifest(data: bytes) -> Manifest | Corrupt | ForeignVersion:
    """Reads a manifest that fills `data` exactly. Any damaged byte gives `Corrupt`."""
    if len(data) < _ENVELOPE.size + _DIGEST_BYTES:
        return Corrupt(f"manifest of {len(data)} bytes is too short")
    magic, version, num_rest = _ENVELOPE.unpack_from(data)
    if magic != _MAGIC or num_rest != len(data) - _ENVELOPE.size:
        return Corrupt(f"manifest of {len(data)} bytes has a wrong envelope")
    if digest_of(data[:-_DIGEST_BYTES]) != data[-_DIGEST_BYTES:]:
        return Corrupt("manifest does not match its seal")
    if version != SCHEMA_VERSION:
        return ForeignVersion(version)
    return _decode_content(data[_ENVELOPE.size : -_DIGEST_BYTES])


def _decode_content(content: bytes) -> Manifest | Corrupt:
    try:
        kind, namespace, prefix, position, group, epoch, chunk_bytes = _BODY.unpack_from(content)
        specs, end = _decode_specs(content, _BODY.size)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        return Corrupt(f"manifest cannot be read: {error}")
    digests = content[end:]
    if kind not in (b"ck", b"kv") or chunk_bytes != CHUNK_BYTES:
        return Corrupt(f"manifest names kind {kind!r} and chunks of {chunk_bytes} bytes")
    if any(spec.dtype not in DTYPE_BYTES for spec in specs):
        return Corrupt(f"manifest names an unknown dtype in {[spec.dtype for spec in specs]}")
    if len(digests) != _DIGEST_BYTES * sum(-(-spec.num_bytes // CHUNK_BYTES) for spec in specs):
        return Corrupt(f"manifest holds {len(digests)} bytes of digests, not one digest per chunk")
    key = ObjectKey("ck" if kind == b"ck" else "kv", namespace, prefix, position, group)
    starts = range(0, len(digests), _DIGEST_BYTES)
    return Manifest(key, epoch, specs, tuple(digests[start : start + _DIGEST_BYTES] for start in starts))


def _encode_spec(spec: PartSpec) -> bytes:
    name, dtype = spec.name.encode(), spec.dtype.encode()
    head = struct.pack("<B", len(name)) + name + struct.pack("<B", len(dtype)) + dtype
    return head + struct.pack(f"<B{len(spec.shape)}Q", len(spec.shape), *spec.shape)


def _decode_specs(content: bytes, at: int) -> tuple[tuple[PartSpec, ...], int]:
    (count,) = _COUNT.unpack_from(content, at)
    at += _COUNT.size
    specs = []
    for _ in range(count):
        name, at = _decode_text(content, at)
        dtype, at = _decode_text(content, at)
        rank = content[at]
        shape = struct.unpack_from(f"<{rank}Q", content, at + 1)
        at += 1 + 8 * rank
        specs.append(PartSpec(name, dtype, shape))
    return tuple(specs), at


def _decode_text(content: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + content[at]
    return content[at + 1 : end].decode(), end
