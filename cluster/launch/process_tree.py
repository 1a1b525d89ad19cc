"""Owns the processes below this one: adopts orphans, and ends whatever is left. Knows no Ray."""

import ctypes
import os
import signal
import subprocess
import sys

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


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
    """Terminates every process below this one, then kills those still there; returns how many were left to end."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        _send(process, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(left, timeout=grace_s)
    for process in stubborn:
        _send(process, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=grace_s)
    return len(left)


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


def raise_on_signals() -> None:
    """SIGINT and SIGTERM both raise KeyboardInterrupt in the main thread. Libraries like to replace the handlers, so
    this is called again after they are set up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def ignore_signals() -> None:
    """SIGINT and SIGTERM have done their work: nothing may interrupt the way down."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
