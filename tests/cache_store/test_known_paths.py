"""What is known of the paths to stored checkpoints, and how it is told."""

import os

from warmstate.cache_store.known_paths import KnownPaths, decode_path, encode_path

PATH = [os.urandom(32) for _ in range(8)]
OTHER = [*PATH[:3], *(os.urandom(32) for _ in range(4))]


def told(path: list[bytes]) -> list[bytes]:
    return decode_path({name.encode(): value for name, value in encode_path(path).items()})


def test_what_a_prompt_shares_with_a_told_path_is_counted_in_tokens() -> None:
    paths = KnownPaths()
    assert paths.count(PATH) == 0
    paths.put(told(PATH))
    assert paths.count(PATH) == 512
    assert paths.count(OTHER) == 192
    assert paths.count(OTHER[3:]) == paths.count([]) == 0


def test_a_path_of_which_only_the_end_was_told_is_known_from_there_on() -> None:
    paths = KnownPaths()
    paths.put(told(PATH[4:]))
    assert [paths.count(PATH[:end]) for end in (4, 5, 8)] == [0, 320, 512]


def test_the_least_recently_told_is_forgotten_first() -> None:
    paths = KnownPaths(max_known=8)
    paths.put(told(PATH))
    paths.put(told(OTHER))
    assert len(paths) == 8
    assert paths.count(OTHER) == 448
    assert paths.count(PATH[:7]) == 192
    assert paths.count(PATH) == 512


def test_a_very_long_path_is_told_in_bounded_space_and_up_to_its_end() -> None:
    path = [os.urandom(32) for _ in range(3003)]
    heads = told(path)
    assert 500 < len(heads) <= 512
    assert heads[-1] == path[-1][:8]
    assert heads == [key[:8] for key in path if key[:8] in set(heads)]
    paths = KnownPaths()
    paths.put(heads)
    assert paths.count(path) == 64 * 3003
    assert 64 * 1990 < paths.count(path[:2000]) <= 64 * 2000


def test_an_entry_of_another_form_tells_nothing() -> None:
    assert decode_path({}) == decode_path({b"b": b"seven.."}) == decode_path({b"x": b"12345678"}) == []
