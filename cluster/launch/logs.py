"""Owns where our log lines go: into Serve's log files, and to the terminal of whoever started us. Knows no Ray.

`warmstate serve` names a file to which its processes all append, and shows at its terminal what comes. Without one
(`serve run`) they write to their stderr, which Ray brings to its own terminal.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

LogLevel = Literal["debug", "info", "warning", "error"]

LOG_FILE_VARIABLE = "WARMSTATE_LOG_FILE"
LOG_FILE_NAME = "warmstate.log"

_POLL_S = 0.1
_SAME_WITHIN_S = 60.0
_MAX_REMEMBERED = 1000
_HANDLER_NAME = "warmstate-terminal"
_SERVE_LOGGER = "ray.serve"


def set_up_logging(level: LogLevel, source: str) -> None:
    """Gives this process's `warmstate` loggers their level and their handlers; `source` names it in every line."""
    logger = logging.getLogger("warmstate")
    logger.setLevel(level.upper())
    for handler in [handler for handler in logger.handlers if handler.name == _HANDLER_NAME]:
        logger.removeHandler(handler)
    logger.addHandler(_terminal_handler(source))
    for handler in _serve_file_handlers():
        if handler not in logger.handlers:
            logger.addHandler(handler)


def _terminal_handler(source: str) -> logging.Handler:
    handler = _TerminalHandler()
    handler.name = _HANDLER_NAME
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {source}: %(message)s", "%H:%M:%S"))
    return handler


class _TerminalHandler(logging.Handler):
    """Appends to the file of the moment, which other processes write to as well, or writes to the stderr of it."""

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n"
        if (name := os.environ.get(LOG_FILE_VARIABLE)) is None:
            sys.stderr.write(line)
            return
        # The directory is removed while the last processes end.
        with contextlib.suppress(FileNotFoundError), open(name, "a") as file:
            file.write(line)


def _serve_file_handlers() -> list[logging.Handler]:
    """Serve's own files, where this process has one; what Serve buffers on the way there would come too late."""
    targets = [getattr(handler, "target", handler) for handler in logging.getLogger(_SERVE_LOGGER).handlers]
    return [target for target in targets if isinstance(target, logging.FileHandler)]


class LogFollower:
    """Context manager: hands every new line of the file to `show`, but once what several processes say alike."""

    def __init__(self, file: Path, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._show = show
        self._clock = clock
        self._position = 0
        self._said: dict[str, tuple[str, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-follower", daemon=True)

    def __enter__(self) -> Self:
        self._file.touch()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_POLL_S):
            self.show_new()
        self.show_new()

    def show_new(self) -> None:
        """Shows the whole lines that have come since the last time."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._position)
                new = file.read()
        except FileNotFoundError:
            return
        new = new[: new.rfind(b"\n") + 1]
        self._position += len(new)
        for line in new.decode(errors="replace").splitlines():
            if self._is_news(line):
                self._show(line)

    def _is_news(self, line: str) -> bool:
        head, found, text = line.partition(": ")
        source, now = head[len("00:00:00 ") :], self._clock()
        first_source, said_at = self._said.get(text, ("", float("-inf")))
        if found and first_source not in ("", source) and now - said_at < _SAME_WITHIN_S:
            return False
        self._said[text] = (source, now)
        if len(self._said) > _MAX_REMEMBERED:
            self._said.pop(next(iter(self._said)))
        return True
