"""Stop strings do not care how text is cut into pieces, and hold back no more than they must."""

from hypothesis import given, settings
from hypothesis import strategies as st

from warmstate.cluster.text.stop_strings import StopStrings

LETTERS = st.text("ab世", max_size=12)
STOPS = st.lists(st.text("ab世", min_size=1, max_size=4), min_size=1, max_size=4)


def _scan(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    scanner = StopStrings(stops, include_match=include)
    shown = ""
    for piece in pieces:
        scan = scanner.feed(piece)
        shown += scan.text
        if scan.matched is not None:
            return shown, scan.matched
    return shown + scanner.flush(), None


def _expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the first end of any stop string, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, st.lists(LETTERS, max_size=8))
@settings(max_examples=400)
def test_the_outcome_is_that_of_the_whole_text_however_it_is_cut(stops: list[str], pieces: list[str]) -> None:
    assert _scan(stops, pieces) == _expected(stops, "".join(pieces))


@given(STOPS, st.lists(LETTERS, max_size=8))
def test_nothing_is_held_back_that_could_not_begin_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    scanner = StopStrings(stops)
    shown = seen = ""
    for piece in pieces:
        scan = scanner.feed(piece)
        seen, shown = seen + piece, shown + scan.text
        if scan.matched is not None:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_three_pieces_ends_the_output_before_it() -> None:
    assert _scan(["END"], ["one E", "N", "D two"]) == ("one ", "END")


def test_the_match_is_shown_when_asked_for() -> None:
    assert _scan(["END"], ["one EN", "D two"], include=True) == ("one END", "END")


def test_what_only_began_like_a_stop_string_is_shown_at_the_end() -> None:
    assert _scan(["END"], ["one EN"]) == ("one EN", None)
