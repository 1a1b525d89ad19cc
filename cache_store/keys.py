"""Owns the identity of a prefix: chained keys over blocks of tokens, and the namespace digest. Knows no model class."""

import hashlib
import hmac
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 64
"""Tokens per block: the unit of hashing, matching and prefill cuts."""

SEGMENT_TOKENS = 256
"""Tokens of attention KV per stored segment; a multiple of `BLOCK_TOKENS`."""

KEY_BYTES = 32
"""Bytes of a prefix key, a whole SHA-256."""

_VERSION = b"warmstate/1"


def length_prefixed(*parts: bytes) -> bytes:
    """Concatenates parts so that no two different lists of parts give the same bytes."""
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def tenant_salt(server_secret: bytes, tenant: str, cache_salt: str | None) -> bytes:
    """HMAC-SHA-256 of who asks: a client cannot reach another tenant's prefixes by sending its salt.

    Returns b"" for the anonymous tenant without a salt, whose prefixes are shared by all such requests.
    """
    if not tenant and cache_salt is None:
        return b""
    fields = [tenant.encode()] if cache_salt is None else [tenant.encode(), cache_salt.encode()]
    return hmac.new(server_secret, length_prefixed(*fields), hashlib.sha256).digest()


def chain_root(salt: bytes = b"", adapter_digest: bytes = b"") -> bytes:
    """H0, the 32-byte key of the empty prefix. It holds no namespace: one chain serves a mixed fleet."""
    return hashlib.sha256(length_prefixed(_VERSION, salt, adapter_digest)).digest()


def extend_chain(key: bytes, tokens: npt.NDArray[np.uint32] | Sequence[int], extras: bytes = b"") -> bytes:
    """The key after one more block: SHA-256(previous | count | tokens as u32 little-endian | extras)."""
    block = np.asarray(tokens, dtype="<u4")
    return hashlib.sha256(key + struct.pack("<I", len(block)) + block.tobytes() + length_prefixed(extras)).digest()


def prefix_keys(tokens: npt.NDArray[np.uint32] | Sequence[int], root: bytes) -> list[bytes]:
    """Keys of every whole block boundary of `tokens`: entry i is the key of the first (i + 1) * 64 tokens."""
    ids = np.asarray(tokens, dtype="<u4")
    keys: list[bytes] = []
    key = root
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        key = extend_chain(key, ids[end - BLOCK_TOKENS : end])
        keys.append(key)
    return keys


def split_keys(joined: bytes) -> list[bytes]:
    """The prefix keys that lie end to end in `joined`."""
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]


def namespace_digest(facts: Mapping[str, bytes]) -> bytes:
    """32-byte digest of everything that makes two states interchangeable (weights, config, tokenizer, dtypes, ...)."""
    items = [item for name in sorted(facts) for item in (name.encode(), facts[name])]
    return hashlib.sha256(length_prefixed(_VERSION, *items)).digest()


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """Names one stored object by what it holds, never by who wrote it.

    kind "ck": the state parts of one head group at `position` (see `store.py`); "kv": the attention KV of the tokens
    [position - 256, position), whose prefix key is the key at `position`.
    """

    kind: Literal["ck", "kv"]
    namespace: bytes
    prefix: bytes
    position: int
    group: int = 0
