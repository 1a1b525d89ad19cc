"""Which prompts a replica remembers, and in what order it forgets them."""

from hypothesis import given
from hypothesis import strategies as st

from warmstate.replicas.cache.seen_prefixes import SeenPrefixes


def path(*tokens: int) -> list[bytes]:
    """Keys that hold, as chained hashes do, all that came before."""
    return [bytes(tokens[: end + 1]) for end in range(len(tokens))]


def test_what_two_prompts_share_is_counted_in_tokens() -> None:
    seen = SeenPrefixes()
    assert seen.count(path(1, 2, 3)) == 0
    seen.put(path(1, 2, 3))
    assert seen.count(path(1, 2, 3)) == 192
    assert seen.count(path(1, 2, 4, 5)) == 128
    assert seen.count(path(2)) == seen.count([]) == 0


def test_the_least_recently_seen_path_is_forgotten_from_its_end() -> None:
    seen = SeenPrefixes(max_blocks=5)
    seen.put(path(1, 2, 3))
    seen.put(path(9, 8, 7))
    assert (seen.count(path(1, 2, 3)), seen.count(path(9, 8, 7)), len(seen)) == (128, 192, 5)
    seen.put(path(1))
    seen.put(path(5))
    assert (seen.count(path(1, 2, 3)), seen.count(path(9, 8, 7))) == (64, 192)


def test_a_prompt_longer_than_all_memory_is_remembered_by_its_beginning() -> None:
    seen = SeenPrefixes(max_blocks=4)
    seen.put(path(*range(10)))
    assert (seen.count(path(*range(10))), len(seen)) == (256, 4)


@given(st.integers(1, 12), st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=20))
def test_what_is_left_of_a_path_is_always_a_beginning(max_blocks: int, paths: list[list[int]]) -> None:
    seen = SeenPrefixes(max_blocks)
    known: set[bytes] = set()
    for tokens in paths:
        seen.put(path(*tokens))
        known |= set(path(*tokens))
        assert len(seen) <= max_blocks
        for other in paths:
            keys = path(*other)
            present = [seen.count(keys[: end + 1]) == 64 * (end + 1) for end in range(len(keys))]
            assert present == sorted(present, reverse=True)
            assert all(key in known for key, here in zip(keys, present, strict=True) if here)
