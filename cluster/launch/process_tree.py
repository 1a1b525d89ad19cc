"""Owns the processes below this one: adopts orphans, and ends whatever is left. Knows no Ray."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from warmstate.cluster.launch.interrupts import ignore_signals

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_ROUNDS = 10


def adopt_orphans() -> None:
    """Makes this process the parent of any descendant whose own parent dies, so that none gets out of sight."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_and_bury(child: "subprocess.Popen[bytes]") -> int:
    """Waits for the child and returns its exit code; adopted orphans that end meanwhile are waited for too, because
    nobody else would, and they would stay as zombies. Nothing else may poll the child."""
    while child.returncode is None:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            # `end_descendants` in a signal handler has waited for all of them.
            return child.wait()
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode


def end_descendants(grace_s: float = 3.0) -> int:
    """Terminates every process below this one, then kills those still there; returns how many were left to end.

    One that starts another at this moment leaves that to whoever adopts orphans, so it looks again until it finds none.
    """
    num_ended = 0
    for _ in range(_MAX_ROUNDS):
        left = [process for process in psutil.Process().children(recursive=True) if _runs(process)]
        if not left:
            break
        num_ended += len(left)
        for process in left:
            _send(process, signal.SIGTERM)
        _, stubborn = psutil.wait_procs(left, timeout=grace_s)
        for process in stubborn:
            _send(process, signal.SIGKILL)
        psutil.wait_procs(stubborn, timeout=3.0)
    return num_ended


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_all_on_signals(directory: Path) -> None:
    """SIGINT and SIGTERM end everything below this process, remove its files, and end it, without an exception that a
    library could swallow. Libraries like to replace the handlers, so this is called again after they are set up."""

    def end_all(number: int, _frame: object) -> None:
        ignore_signals()
        adopt_orphans()
        end_descendants(grace_s=1.0)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_all)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def die_with_parent(number: signal.Signals = signal.SIGINT) -> None:
    """Lets this process get `number` when the one that started it dies, however that happens, even if ignored."""
    # A shell has its background jobs ignore SIGINT, and what they start inherits that.
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
