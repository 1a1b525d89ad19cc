"""Owns how loading is shown: a bar on a terminal, a line per tenth in a log."""

import logging
import sys
from types import TracebackType
from typing import NoReturn, TextIO

from tqdm import tqdm

_log = logging.getLogger(__name__)


class LoadingBar:
    """A `loading.Progress` callback and a context manager that closes the bar; off a terminal, `logging` gets lines."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._bar: tqdm[NoReturn] | None = None
        self._tenths_logged = 0

    def __call__(self, bytes_done: int, bytes_total: int) -> None:
        if self._stream.isatty():
            self._draw(bytes_done, bytes_total)
        else:
            self._report(bytes_done, bytes_total)

    def __enter__(self) -> "LoadingBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def _draw(self, bytes_done: int, bytes_total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=bytes_total, desc=self._label, unit="B", unit_scale=True, file=self._stream)
        self._bar.update(bytes_done - self._bar.n)

    def _report(self, bytes_done: int, bytes_total: int) -> None:
        tenths = 10 if bytes_done >= bytes_total else 10 * bytes_done // bytes_total
        if tenths > self._tenths_logged:
            self._tenths_logged = tenths
            _log.info("%s: %d %% of %.1f MB", self._label, 10 * tenths, bytes_total / 1e6)
