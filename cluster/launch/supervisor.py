"""Runs a command as a child and sees to it that nothing of it remains, however it ends. Knows no Ray.

The child has a session of its own. A signal to our whole process group (Ctrl-C in a terminal, `timeout`, a service
manager) would else reach the daemons below at the same moment, and with those gone nobody could stop in order.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from warmstate.cluster.launch.interrupts import interrupts_held_back
from warmstate.cluster.launch.process_tree import adopt_orphans, end_descendants, wait_and_bury

DIRECTORY_VARIABLE = "WARMSTATE_RUN_DIRECTORY"
"""Tells the child where it may put files; the directory is removed with it."""


_REPEAT_S = 1.0
_PATIENCE_S = 30.0
"""How long the child may take to stop in order."""


def supervise(arguments: Sequence[str]) -> int:
    """Runs `warmstate` with `arguments`; returns its exit code. The first SIGINT or SIGTERM asks it to stop, the second
    ends it and everything below it at once."""
    stopper = _Stopper()
    adopt_orphans()
    # Short, because Ray puts unix sockets below it and their paths are limited to 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="warmstate-", dir="/tmp"))
    command = [sys.executable, "-m", "warmstate.cluster.main", *arguments]
    environment = {**os.environ, DIRECTORY_VARIABLE: str(directory), "TMPDIR": str(directory)}
    try:
        with interrupts_held_back():
            child = subprocess.Popen(command, env=environment, start_new_session=True)
            stopper.watch(child.pid)
        code = wait_and_bury(child)
    finally:
        stopper.rest()
        end_descendants()
        shutil.rmtree(directory, ignore_errors=True)
    return code if code >= 0 else 128 - code


class _Stopper:
    """Turns the signals that reach this process into SIGINTs of the child: again each second, because a library of the
    child's may swallow the exception that comes of one, and one that stops already takes no more notice."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._num_received = 0
        self._stop_by_s = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)
        signal.signal(signal.SIGALRM, self._ask)

    def watch(self, pid: int) -> None:
        """From now on there is a child; what was received before is passed on."""
        self._pid = pid
        if self._num_received:
            self._ask()

    def rest(self) -> None:
        """The child has ended."""
        self._pid = None
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _receive(self, _number: int, _frame: object) -> None:
        self._num_received += 1
        self._stop_by_s = self._stop_by_s or time.monotonic() + _PATIENCE_S
        if self._pid is None:
            return
        if self._num_received == 1:
            self._ask()
        else:
            end_descendants(grace_s=0)

    def _ask(self, _number: int = 0, _frame: object = None) -> None:
        if self._pid is None:
            return
        if time.monotonic() > self._stop_by_s:
            end_descendants(grace_s=0)
            return
        # Not Popen's own, which polls.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGINT)
        signal.setitimer(signal.ITIMER_REAL, _REPEAT_S)
