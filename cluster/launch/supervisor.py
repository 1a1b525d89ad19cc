"""Runs a command as a child and sees to it that nothing of it remains, however it ends. Knows no Ray.

The child has a session of its own. A signal to our whole process group (Ctrl-C in a terminal, `timeout`, a service
manager) would else reach the daemons below at the same moment, and with those gone nobody could stop in order.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from warmstate.cluster.launch.process_tree import adopt_orphans, end_descendants, wait_and_bury

DIRECTORY_VARIABLE = "WARMSTATE_RUN_DIRECTORY"
"""Tells the child where it may put files; the directory is removed with it."""


def supervise(arguments: Sequence[str]) -> int:
    """Runs `warmstate` with `arguments`; returns its exit code. The first SIGINT or SIGTERM asks it to stop, the second
    ends it and everything below it at once."""
    adopt_orphans()
    # Short, because Ray puts unix sockets below it and their paths are limited to 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="warmstate-", dir="/tmp"))
    command = [sys.executable, "-m", "warmstate.cluster.main", *arguments]
    environment = {**os.environ, DIRECTORY_VARIABLE: str(directory), "TMPDIR": str(directory)}
    try:
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        _pass_signals_to(child)
        code = wait_and_bury(child)
    finally:
        end_descendants()
        shutil.rmtree(directory, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _pass_signals_to(child: "subprocess.Popen[bytes]") -> None:
    num_received = 0

    def pass_on(_number: int, _frame: object) -> None:
        nonlocal num_received
        num_received += 1
        if num_received == 1:
            # Not Popen's own, which polls.
            os.kill(child.pid, signal.SIGINT)
        else:
            end_descendants(grace_s=0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
