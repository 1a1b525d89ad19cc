"""Owns stop strings over text that comes in pieces. Knows no tokens."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """`text` may be shown; `matched` is the stop string that ended the output, if one did."""

    text: str
    matched: str | None = None


class StopStrings:
    """Finds the stop string that is completed first; of several completed by the same character, the longest.

    Completion decides, not the start, so the result depends only on the text and never on how it was cut into pieces.
    Text is held back only while it could be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_match: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_match = include_match
        self._held = ""

    def feed(self, text: str) -> StopScan:
        """Scans more text; after a match the output is over and `feed` must not be called again."""
        if not self._stops:
            return StopScan(text)
        buffer = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return StopScan(buffer[: end if self._include_match else start], stop)
        cut = len(buffer) - self._num_held(buffer)
        self._held = buffer[cut:]
        return StopScan(buffer[:cut])

    def flush(self) -> str:
        """The text still held back, once no more can come."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, buffer: str) -> int:
        return max(longest_partial(buffer, stop) for stop in self._stops)


def longest_partial(text: str, pattern: str) -> int:
    """Length of the longest proper beginning of `pattern` that `text` ends with."""
    for length in range(min(len(pattern) - 1, len(text)), 0, -1):
        if text.endswith(pattern[:length]):
            return length
    return 0
