"""The books of the paged KV blocks."""

import random

import pytest

from warmstate.models.backend import blocks_for
from warmstate.replicas.kv_blocks import BlockPool


def key(index: int) -> bytes:
    return bytes([index]) * 32


def test_blocks_are_counted_in_64_tokens() -> None:
    assert [blocks_for(n) for n in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.take_free(3)) == [1, 2, 3]
    assert not pool.fits(1)


def test_a_released_block_is_found_by_its_key_until_it_is_handed_out_again() -> None:
    pool = BlockPool(4)
    first, second = pool.take_free(2)
    pool.put_key(first, key(1))
    pool.put_key(second, key(2))
    pool.release([first, second])
    assert pool.count_resident([key(1), key(2)]) == 2
    assert pool.take_resident([key(1)]) == [first]
    # The unkeyed block goes first, then the tail.
    assert pool.take_free(1) == [3]
    assert pool.take_free(1) == [second]
    assert pool.count_resident([key(1), key(2)]) == 1


def test_the_tail_of_a_table_is_reused_before_its_head() -> None:
    pool = BlockPool(4)
    table = pool.take_free(3)
    for index, block in enumerate(table):
        pool.put_key(block, key(index))
    pool.release(table)
    assert [pool.take_free(1)[0] for _ in range(3)] == table[::-1]


def test_a_prefix_is_resident_only_up_to_its_first_missing_block() -> None:
    pool = BlockPool(4)
    blocks = pool.take_free(2)
    pool.put_key(blocks[0], key(0))
    pool.put_key(blocks[1], key(2))
    assert pool.count_resident([key(0), key(1), key(2)]) == 1


def test_twin_blocks_keep_the_first_and_forget_nothing_else() -> None:
    pool = BlockPool(4)
    first, second = pool.take_free(2)
    pool.put_key(first, key(0))
    pool.put_key(second, key(0))
    pool.forget(second)
    assert pool.take_resident([key(0)]) == [first]


def test_a_forgotten_block_cannot_be_found() -> None:
    pool = BlockPool(3)
    (block,) = pool.take_free(1)
    pool.put_key(block, key(0))
    pool.forget(block)
    assert pool.count_resident([key(0)]) == 0


def test_shared_free_blocks_count_as_used_when_asking_for_room() -> None:
    pool = BlockPool(4)
    table = pool.take_free(3)
    pool.put_key(table[0], key(0))
    pool.release(table)
    assert pool.fits(3, [key(0)])
    assert not pool.fits(4, [key(0)])
    assert not pool.fits(3, [key(0)], spare=1)
    pool.take_resident([key(0)])
    assert pool.fits(3, [key(0)])


def test_a_double_release_is_noticed() -> None:
    pool = BlockPool(3)
    table = pool.take_free(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(table)


@pytest.mark.parametrize("seed", range(5))
def test_the_books_balance_after_random_use(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(20)
    tables: list[list[int]] = []
    for step in range(400):
        keys = [key(i) for i in range(rng.randrange(6))]
        keys = keys[: pool.count_resident(keys)]
        count = rng.randrange(len(keys), len(keys) + 4)
        if rng.random() < 0.5 and pool.fits(count, keys):
            table = pool.take_resident(keys) + pool.take_free(count - len(keys))
            for index, block in enumerate(table[:6]):
                pool.put_key(block, key(index))
            tables.append(table)
        elif tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        pool.check_integrity()
        assert pool.num_free == 19 - len({block for table in tables for block in table}), f"step {step}"
    for table in tables:
        pool.release(table)
    assert pool.num_free == 19
