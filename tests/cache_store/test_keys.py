"""Prefix keys: the chain is pinned by a golden vector, and nothing crosses salts, blocks or namespaces."""

import hashlib
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from warmstate.cache_store.keys import (
    BLOCK_TOKENS,
    ObjectKey,
    chain_root,
    extend_chain,
    length_prefixed,
    namespace_digest,
    prefix_keys,
    split_keys,
    tenant_salt,
)
from warmstate.cache_store.names import object_name

SECRET = b"s" * 32
GOLDEN_CHAIN = [
    "6f4d5d4edc5fdde2a5196847254a951d7e40d856034ba2d8ec3a97718dabfba3",
    "ae2e3d5f83bccfa4521561b0b18a6559d03d84ab2dd815bb2f6f8813a9cad6e3",
]


def test_the_chain_matches_its_golden_vector() -> None:
    keys = prefix_keys(list(range(130)), chain_root())
    assert [key.hex() for key in keys] == GOLDEN_CHAIN


def test_the_chain_is_sha256_over_the_documented_bytes() -> None:
    tokens = np.arange(BLOCK_TOKENS, dtype="<u4")
    root = hashlib.sha256(b"".join(struct.pack("<Q", len(p)) + p for p in (b"warmstate/1", b"", b""))).digest()
    block = root + struct.pack("<I", 64) + tokens.tobytes() + struct.pack("<Q", 0)
    assert prefix_keys(tokens, chain_root()) == [hashlib.sha256(block).digest()]


def test_joined_keys_come_apart_again() -> None:
    keys = prefix_keys(range(300), chain_root())
    assert split_keys(b"".join(keys)) == keys
    assert split_keys(b"") == []


def test_a_partial_block_has_no_key() -> None:
    assert prefix_keys(list(range(63)), chain_root()) == []
    assert len(prefix_keys(list(range(64)), chain_root())) == 1


@given(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=200), st.data())
def test_one_changed_token_changes_every_later_key_and_no_earlier_one(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) // 64 * 64 - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = prefix_keys(tokens, chain_root()), prefix_keys(changed, chain_root())
    assert before[: at // 64] == after[: at // 64]
    assert not set(before[at // 64 :]) & set(after)


def test_the_same_block_at_another_depth_has_another_key() -> None:
    keys = prefix_keys([7] * 256, chain_root())
    assert len(set(keys)) == 4


def test_salts_and_adapters_do_not_cross() -> None:
    roots = [chain_root(), chain_root(b"a"), chain_root(b"", b"a"), chain_root(b"a", b"a"), chain_root(b"aa")]
    firsts = [prefix_keys([1] * 64, root)[0] for root in roots]
    assert len(set(firsts)) == len(roots)


def test_a_client_cannot_reach_another_tenant_by_its_salt() -> None:
    salts = [
        tenant_salt(SECRET, "alice", None),
        tenant_salt(SECRET, "alice", ""),
        tenant_salt(SECRET, "alice", "bob"),
        tenant_salt(SECRET, "bob", None),
        tenant_salt(SECRET, "bob", "alice"),
        tenant_salt(SECRET, "", "alice"),
        tenant_salt(SECRET, "alicebob", None),
        tenant_salt(b"t" * 32, "alice", None),
        tenant_salt(SECRET, "", None),
    ]
    assert len(set(salts)) == len(salts)


def test_extras_cannot_be_mistaken_for_tokens() -> None:
    root = chain_root()
    assert extend_chain(root, [1, 2], b"") != extend_chain(root, [1], struct.pack("<I", 2))
    assert extend_chain(root, [1], b"ab") != extend_chain(root, [1], b"a")


@given(st.lists(st.binary(max_size=12), max_size=4), st.lists(st.binary(max_size=12), max_size=4))
def test_length_prefixes_tell_different_lists_apart(left: list[bytes], right: list[bytes]) -> None:
    assert (length_prefixed(*left) == length_prefixed(*right)) == (left == right)


def test_the_namespace_depends_on_every_fact_and_not_on_their_order() -> None:
    facts = {"weights": b"w", "config": b"c"}
    same = namespace_digest({"config": b"c", "weights": b"w"})
    others = [{"weights": b"w"}, {"weights": b"c", "config": b"w"}, {**facts, "dtype": b""}, {"weightsw": b"c"}]
    assert namespace_digest(facts) == same
    assert same not in [namespace_digest(other) for other in others]


def test_every_part_of_an_object_key_is_in_its_name() -> None:
    keys = [
        ObjectKey("ck", bytes(32), bytes(32), 64),
        ObjectKey("kv", bytes(32), bytes(32), 64),
        ObjectKey("ck", b"\1" * 32, bytes(32), 64),
        ObjectKey("ck", bytes(32), bytes(31) + b"\1", 64),
        ObjectKey("ck", bytes(32), bytes(32), 64, group=1),
    ]
    assert len({object_name(key) for key in keys}) == len(keys)
