"""The store in memory beyond the contract: exact accounting, eviction order, lent memory, threads."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import Dropped, DropReason, Exists, Hit, Part, PartSpec, Stored

MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
EmptyLike = Callable[[dict[str, Part]], dict[str, Part]]

KILOBYTE = {"rec": ("uint8", (1000,))}


def test_bytes_are_exact_after_puts_evictions_and_deletes(make_key: MakeKey, make_parts: MakeParts) -> None:
    store, keys = MemoryStore(3500), [make_key() for _ in range(5)]
    for key in keys:
        assert store.put_now(key, make_parts(**KILOBYTE)) == Stored(1000)
    stats = store.stats()
    assert (stats["bytes"], stats["objects"], stats["evictions"]) == (3000, 3, 2)
    store.delete_now(keys[4])
    store.delete_now(keys[4])
    assert store.stats()["bytes"] == 2000


def test_what_was_used_least_recently_goes_first(
    make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    store, parts = MemoryStore(3000), make_parts(**KILOBYTE)
    first, second, third, fourth, fifth = (make_key() for _ in range(5))
    for key in (first, second, third):
        store.put_now(key, parts)
    assert isinstance(store.get_now(first, empty_like(parts)), Hit)
    assert store.put_now(second, parts) == Exists()
    assert store.contains(third)
    store.put_now(fourth, parts)
    store.put_now(fifth, parts)
    assert [store.contains(key) for key in (first, second, third, fourth, fifth)] == [False, True, False, True, True]


def test_an_object_too_large_for_the_budget_evicts_nothing(make_key: MakeKey, make_parts: MakeParts) -> None:
    store, kept = MemoryStore(1000), make_key()
    store.put_now(kept, make_parts(**KILOBYTE))
    assert isinstance(store.put_now(make_key(), make_parts(rec=("uint8", (1001,)))), Dropped)
    assert store.contains(kept)


def test_borrowed_parts_are_read_only_and_outlive_their_eviction(make_key: MakeKey, make_parts: MakeParts) -> None:
    store, key, parts = MemoryStore(1000), make_key(), make_parts(**KILOBYTE)
    store.put_now(key, parts)
    borrowed = store.borrow(key)
    assert borrowed is not None
    store.delete_now(key)
    assert store.borrow(key) is None
    assert bytes(borrowed["rec"].data) == bytes(parts["rec"].data)
    with pytest.raises(TypeError):
        borrowed["rec"].data[0] = 1


def test_evicted_bytes_count_while_somebody_holds_them(make_key: MakeKey, make_parts: MakeParts) -> None:
    store, key, parts = MemoryStore(1500), make_key(), make_parts(**KILOBYTE)
    store.put_now(key, parts)
    borrowed = store.borrow(key)
    outcome = store.put_now(make_key(), parts)
    assert isinstance(outcome, Dropped)
    assert outcome.reason is DropReason.NO_ROOM
    assert (store.stats()["bytes"], store.stats()["lent_bytes"], store.free_bytes) == (1000, 1000, 500)
    del borrowed
    assert (store.stats()["bytes"], store.stats()["lent_bytes"], store.free_bytes) == (0, 0, 1500)
    assert store.put_now(make_key(), parts) == Stored(1000)


def test_given_parts_are_kept_without_a_copy(make_key: MakeKey) -> None:
    store, key, array = MemoryStore(1000), make_key(), np.zeros(1000, dtype=np.uint8)
    given = {"rec": Part(PartSpec("rec", "uint8", (1000,)), array.data)}
    assert store.give_now(key, given) == Stored(1000)
    assert store.give_now(key, given) == Exists()
    kept = store.borrow(key)
    assert kept is not None
    array[7] = 9
    assert kept["rec"].data[7] == 9
    assert kept["rec"].data.readonly


def test_reserved_bytes_are_taken_from_the_budget(make_key: MakeKey, make_parts: MakeParts) -> None:
    store, key, parts = MemoryStore(2000, evicts=False), make_key(), make_parts(**KILOBYTE)
    assert store.put_now(key, parts) == Stored(1000)
    assert not store.reserve(1001)
    assert store.reserve(1000)
    assert isinstance(store.put_now(make_key(), parts), Dropped)
    assert store.contains(key)
    store.release(1000)
    assert store.put_now(make_key(), parts) == Stored(1000)
    assert store.free_bytes == 0


def test_a_failed_get_counts_as_a_miss(make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike) -> None:
    store, key, parts = MemoryStore(1000), make_key(), make_parts(**KILOBYTE)
    store.get_now(key, empty_like(parts))
    store.put_now(key, parts)
    store.get_now(key, empty_like(make_parts(rec=("int8", (1000,)))))
    store.get_now(key, empty_like(parts))
    assert (store.stats()["misses"], store.stats()["hits"]) == (2, 1)


def test_many_threads_keep_the_budget_and_never_mix_objects(
    make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    objects = [(make_key(), make_parts(seed=seed, rec=("uint8", (5000 + seed,)))) for seed in range(20)]
    store = MemoryStore(40_000)
    faults: list[str] = []

    def work(start: int) -> None:
        for step in range(300):
            key, parts = objects[(start * 7 + step) % len(objects)]
            into = empty_like(parts)
            if isinstance(store.get_now(key, into), Hit) and bytes(into["rec"].data) != bytes(parts["rec"].data):
                faults.append("another object's bytes")
            store.put_now(key, parts)
            if store.stats()["bytes"] > 40_000:
                faults.append("over budget")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    held = [parts["rec"].data.nbytes for key, parts in objects if store.contains(key)]
    assert store.stats()["bytes"] == sum(held)
