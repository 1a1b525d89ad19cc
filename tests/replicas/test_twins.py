"""Who waits for whom."""

from collections.abc import Callable
from typing import Any

import pytest

from warmstate.replicas.cache.twins import PendingPrefixes
from warmstate.replicas.sequence import Sequence

KEYS = [bytes([i]) * 32 for i in range(4)]


@pytest.fixture
def sequences(request_for: Callable[..., Any]) -> list[Sequence]:
    return [Sequence(request_for([1]), arrival, 4096) for arrival in range(3)]


def test_the_first_to_promise_leads(sequences: list[Sequence]) -> None:
    pending = PendingPrefixes()
    pending.put(sequences[0], KEYS[1])
    pending.put(sequences[1], KEYS[1])
    assert pending.find_leader(sequences[2], KEYS, 0) is sequences[0]
    pending.withdraw(sequences[1])
    assert pending.find_leader(sequences[2], KEYS, 0) is sequences[0]


def test_the_deepest_promise_beyond_what_is_usable_counts(sequences: list[Sequence]) -> None:
    pending = PendingPrefixes()
    pending.put(sequences[0], KEYS[0])
    pending.put(sequences[1], KEYS[2])
    assert pending.find_leader(sequences[2], KEYS, 0) is sequences[1]
    assert pending.find_leader(sequences[2], KEYS[:2], 0) is sequences[0]
    assert pending.find_leader(sequences[2], KEYS, 192) is None


def test_nobody_waits_for_itself(sequences: list[Sequence]) -> None:
    pending = PendingPrefixes()
    pending.put(sequences[0], KEYS[1])
    assert pending.find_leader(sequences[0], KEYS, 0) is None


def test_withdrawn_promises_are_gone(sequences: list[Sequence]) -> None:
    pending = PendingPrefixes()
    for key in KEYS:
        pending.put(sequences[0], key)
    pending.withdraw(sequences[0])
    assert pending.is_empty


def test_a_copy_stands_for_its_promise_when_the_sequence_has_gone(sequences: list[Sequence]) -> None:
    pending = PendingPrefixes()
    for key in KEYS:
        pending.put(sequences[0], key)
    copy = pending.hand_over(sequences[0], KEYS[3])
    pending.withdraw(sequences[0])
    leader = pending.find_leader(sequences[1], KEYS, 0)
    assert leader is copy
    assert leader.arrival == sequences[0].arrival
    pending.withdraw(copy)
    assert pending.is_empty


def test_a_copy_takes_no_promise_from_another_leader(sequences: list[Sequence]) -> None:
    pending = PendingPrefixes()
    pending.put(sequences[0], KEYS[1])
    pending.withdraw(pending.hand_over(sequences[1], KEYS[1]))
    assert pending.find_leader(sequences[2], KEYS, 0) is sequences[0]
