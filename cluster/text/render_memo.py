"""Owns rendered texts that many requests have in common, so that each is rendered once. Knows no template."""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

_MAX_TEXT_CHARS = 1 << 18


class RenderMemo:
    """The last `max_entries` results by what they were rendered from. Thread-safe; long texts are not kept."""

    def __init__(self, max_entries: int = 64) -> None:
        self._max_entries = max_entries
        self._lock = Lock()
        self._texts: OrderedDict[str, str] = OrderedDict()

    def get(self, sources: Sequence[Any], render: Callable[[], str | None]) -> str | None:
        """The text made from `sources`, which are JSON: remembered, or rendered now. None is not remembered."""
        key = json.dumps(sources, separators=(",", ":"), default=dict)
        with self._lock:
            if (text := self._texts.get(key)) is not None:
                self._texts.move_to_end(key)
                return text
        text = render()
        if text is not None and len(text) + len(key) <= _MAX_TEXT_CHARS:
            with self._lock:
                self._texts[key] = text
                while len(self._texts) > self._max_entries:
                    self._texts.popitem(last=False)
        return text
