"""The stored form: what is written is read back, and nothing is believed that is not sealed."""

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstate.cache_store.codec import (
    CHUNK_BYTES,
    Corrupt,
    ForeignVersion,
    Manifest,
    chunks_of,
    decode_manifest,
    describe,
    digest_of,
    encode_manifest,
    manifest_bytes,
)
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.store import DTYPE_BYTES, Part, PartSpec

SPECS = st.lists(
    st.builds(
        PartSpec,
        st.text(min_size=1, max_size=12),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 300), max_size=4).map(tuple),
    ),
    max_size=4,
)


def resealed(content: bytes) -> bytes:
    """As a writer with a bug would leave it: wrong inside, with a seal that fits."""
    return content[:-16] + digest_of(content[:-16])


@given(SPECS, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.sampled_from(["ck", "kv"]))
def test_a_manifest_comes_back_as_it_was(specs: list[PartSpec], epoch: int, group: int, kind: str) -> None:
    key = ObjectKey("kv" if kind == "kv" else "ck", b"n" * 32, b"p" * 32, 2**40, group)
    digests = tuple(digest_of(bytes([index % 256])) for index in range(len(chunks_of(specs))))
    manifest = Manifest(key, epoch, tuple(specs), digests)
    encoded = encode_manifest(manifest)
    assert len(encoded) == manifest_bytes(specs)
    assert decode_manifest(encoded) == manifest


@given(st.binary(max_size=400))
def test_bytes_of_strangers_are_corrupt(data: bytes) -> None:
    assert isinstance(decode_manifest(data), Corrupt)


@given(st.binary(max_size=300))
def test_a_sealed_body_of_nonsense_is_read_without_an_exception(body: bytes) -> None:
    content = struct.pack("<4sHI", b"WSOB", 1, len(body) + 16) + body
    assert isinstance(decode_manifest(content + digest_of(content)), Corrupt | Manifest)


@pytest.mark.parametrize(
    "spec", [PartSpec("rec", "float32", (2**60, 2**60)), PartSpec("rec", "complex64", (1,))], ids=["huge", "dtype"]
)
def test_a_sealed_manifest_with_an_absurd_part_is_corrupt(spec: PartSpec, make_key: Callable[..., ObjectKey]) -> None:
    encoded = encode_manifest(Manifest(make_key(), 0, (spec,), (bytes(16),)))
    assert isinstance(decode_manifest(encoded), Corrupt)


def test_another_schema_version_is_told_from_damage(
    make_key: Callable[..., ObjectKey], make_parts: Callable[..., dict[str, Part]]
) -> None:
    manifest = describe(make_key(), make_parts(), epoch=3)
    encoded = encode_manifest(manifest, schema_version=7)
    assert decode_manifest(encoded) == ForeignVersion(7)
    assert isinstance(decode_manifest(encoded[:-1] + bytes([encoded[-1] ^ 1])), Corrupt)


def test_another_chunk_size_is_corrupt_even_when_sealed(
    make_key: Callable[..., ObjectKey], make_parts: Callable[..., dict[str, Part]]
) -> None:
    encoded = encode_manifest(describe(make_key(), make_parts(), epoch=0))
    at = encoded.index(struct.pack("<I", CHUNK_BYTES))
    other = encoded[:at] + struct.pack("<I", CHUNK_BYTES // 2) + encoded[at + 4 :]
    assert isinstance(decode_manifest(resealed(other)), Corrupt)


@given(st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=4))
def test_chunks_cover_every_byte_once_and_never_two_parts(sizes: list[int]) -> None:
    specs = [PartSpec(f"p{index}", "uint8", (size,)) for index, size in enumerate(sizes)]
    chunks = chunks_of(specs)
    offset = 0
    for spec in specs:
        end = 0
        for chunk in (chunk for chunk in chunks if chunk.part == spec.name):
            assert (chunk.start, chunk.offset) == (end, offset + end)
            assert 0 < chunk.num_bytes <= CHUNK_BYTES
            end = chunk.stop
        assert end == spec.num_bytes
        offset += end
    assert len({chunk.field for chunk in chunks}) == len(chunks)
