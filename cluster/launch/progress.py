"""Shows how far start-up is: a line per phase, on a terminal with a bar that fills. Knows no Ray."""

import sys
import threading
import time
from typing import TextIO

_LOG_STEP = 0.1
_BAR_CELLS = 24


class Progress:
    """`show` takes the current phase; on a terminal the line is rewritten, elsewhere a line comes per 10 %."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._started = time.monotonic()
        self._phase: str | None = None
        self._shown = ""
        self._shown_fraction = 0.0
        self._is_muted = False
        # Notes come from another thread.
        self._lock = threading.Lock()

    def show(self, phase: str, fraction: float | None = None) -> None:
        """Tells the phase, and the fraction of it that is done, in [0, 1], where that is known."""
        with self._lock:
            self._show(phase, fraction)

    def note(self, line: str) -> None:
        """A line of its own beside the phases."""
        with self._lock:
            if self._is_muted:
                return
            if self._is_terminal and self._phase is not None:
                self._stream.write("\r\x1b[K")
            self._stream.write(f"{line}\n")
            if self._is_terminal and self._phase is not None:
                self._stream.write(self._shown)
            self._stream.flush()

    def mute(self) -> None:
        """Drops notes from now on: each part of what is being stopped finds others gone, and would say so."""
        with self._lock:
            self._is_muted = True

    def _show(self, phase: str, fraction: float | None) -> None:
        if phase == self._phase and not self._is_news(fraction):
            return
        if self._is_terminal and phase == self._phase:
            self._stream.write("\r\x1b[K")
        elif self._is_terminal and self._phase is not None:
            self._stream.write("\n")
        self._phase, self._shown_fraction = phase, fraction or 0.0
        self._shown = f"[{time.monotonic() - self._started:5.1f} s] {phase}{self._share(fraction)}"
        self._stream.write(self._shown)
        if not self._is_terminal:
            self._stream.write("\n")
        self._stream.flush()

    def end(self) -> None:
        """Leaves the last line as it stands."""
        with self._lock:
            if self._is_terminal and self._phase is not None:
                self._stream.write("\n")
                self._stream.flush()
            self._phase = None

    def _is_news(self, fraction: float | None) -> bool:
        step = 0.01 if self._is_terminal else _LOG_STEP
        return fraction is not None and fraction - self._shown_fraction >= step

    def _share(self, fraction: float | None) -> str:
        if fraction is None:
            return ""
        return f" {_bar(fraction)} {fraction:4.0%}" if self._is_terminal else f" {fraction:4.0%}"


def _bar(fraction: float) -> str:
    filled = round(fraction * _BAR_CELLS)
    return f"[{'#' * filled}{'.' * (_BAR_CELLS - filled)}]"
