"""Reasoning and content come apart the same way, however the text is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstate.cluster.text.reasoning import ReasoningSplitter


def _split(pieces: list[str], *, starts_inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(starts_inside=starts_inside)
    parts = [*map(splitter.feed, pieces), splitter.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


CASES = [
    pytest.param("hm\n</think>\n\nYes", True, ("hm", "Yes"), id="opened by the prompt"),
    pytest.param("<think>\nhm\n</think>\n\nYes", False, ("hm", "Yes"), id="opened by the model"),
    pytest.param("\n<think>hm</think>Yes", False, ("hm", "Yes"), id="white space before the tag"),
    pytest.param("Yes", False, ("", "Yes"), id="no thinking"),
    pytest.param("  Yes\n", False, ("", "  Yes\n"), id="white space of content stays"),
    pytest.param("<think>\n\n</think>\n\nYes", False, ("", "Yes"), id="empty block"),
    pytest.param("never ends", True, ("never ends", ""), id="cut off while thinking"),
    pytest.param("a < b </thin", True, ("a < b </thin", ""), id="cut off inside a tag"),
    pytest.param("a\n\nb</think>c", True, ("a\n\nb", "c"), id="newlines within reasoning stay"),
    pytest.param("a</think>b</think>c<think>d", True, ("a", "b</think>c<think>d"), id="only the first end counts"),
    pytest.param("use <think> wisely", False, ("", "use <think> wisely"), id="a tag further on is content"),
    pytest.param("<thinking>", False, ("", "<thinking>"), id="another tag"),
    pytest.param("", True, ("", ""), id="nothing"),
]


@pytest.mark.parametrize(("text", "starts_inside", "expected"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_reasoning_and_content_come_apart(text: str, starts_inside: bool, expected: tuple[str, str], size: int) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert _split(pieces, starts_inside=starts_inside) == expected


FRAGMENTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "/th", "ink>", "\n", "a", " "]), max_size=12)


@given(FRAGMENTS, st.booleans())
def test_cutting_differently_changes_nothing(pieces: list[str], starts_inside: bool) -> None:
    text = "".join(pieces)
    whole = _split([text], starts_inside=starts_inside)
    assert _split(pieces, starts_inside=starts_inside) == whole
    assert _split(list(text), starts_inside=starts_inside) == whole
