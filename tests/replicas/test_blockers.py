"""What is said to have kept a prompt from a longer hit."""

import pytest

from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.store import MissReason
from warmstate.replicas.cache.blockers import Blocked, Blocker, PathFacts, blocked_here
from warmstate.replicas.cache.fetch_miss import FetchMiss


def key(kind: str) -> ObjectKey:
    return ObjectKey("ck" if kind == "ck" else "kv", bytes(32), bytes(32), 576)


def test_a_full_hit_was_blocked_by_nothing() -> None:
    assert blocked_here(PathFacts(limit=576, num_cached=576, num_kv=576, num_state=576, num_stored=576)) == []


def test_a_state_without_its_kv_is_blocked_by_kv() -> None:
    assert blocked_here(PathFacts(limit=1024, num_cached=0, num_kv=256, num_state=576)) == [Blocked(Blocker.KV, 576)]


def test_kv_without_a_state_is_blocked_by_the_recurrent_state() -> None:
    facts = PathFacts(limit=1024, num_cached=128, num_kv=512, num_state=128)
    assert blocked_here(facts) == [Blocked(Blocker.RECURRENT, 384)]


@pytest.mark.parametrize(
    ("miss", "blocker"),
    [
        (None, Blocker.NOT_FETCHED),
        (FetchMiss(MissReason.TIMEOUT), Blocker.STORE),
        (FetchMiss(MissReason.ABSENT, key("kv")), Blocker.KV),
        (FetchMiss(MissReason.CORRUPT, key("kv"), "kv"), Blocker.KV),
        (FetchMiss(MissReason.ABSENT, key("ck")), Blocker.RECURRENT),
        (FetchMiss(MissReason.CORRUPT, key("ck"), "rec"), Blocker.RECURRENT),
        (FetchMiss(MissReason.CORRUPT, key("ck"), "conv"), Blocker.CONV),
        (FetchMiss(MissReason.LAYOUT, key("ck")), Blocker.RECURRENT),
    ],
)
def test_a_stored_prefix_that_did_not_come_is_blocked_by_what_failed(miss: FetchMiss | None, blocker: Blocker) -> None:
    facts = PathFacts(limit=1024, num_cached=64, num_stored=576, fetch_miss=miss)
    assert blocked_here(facts) == [Blocked(blocker, 512)]


def test_each_token_has_one_blocker_and_none_lies_beyond_the_limit() -> None:
    facts = PathFacts(limit=1024, num_cached=64, num_kv=4096, num_state=512, num_stored=256)
    assert blocked_here(facts) == [
        Blocked(Blocker.NOT_FETCHED, 192),
        Blocked(Blocker.KV, 256),
        Blocked(Blocker.RECURRENT, 512),
    ]
