"""Ctrl-C at any moment of the way up: it ends at once, without a traceback, and nothing of it remains."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from warmstate.cluster.launch.ports import find_free_ports

pytestmark = pytest.mark.cluster

# The interpreter itself, which ends in a traceback, has come up by then.
EARLIEST_S = 0.3
LATEST_S = 18.0
END_TIMEOUT_S = 15
MARK = "WARMSTATE_TEST_MARK"

Interrupt = Callable[[float, signal.Signals], None]


def processes_with(mark: str) -> list[psutil.Process]:
    """Those that have inherited our mark, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def interrupt(checkpoint: Path, tmp_path: Path) -> Interrupt:
    """Starts the command, signals its process group after so many seconds, and checks how it ends."""

    def run(delay_s: float, number: signal.Signals) -> None:
        mark, log_file = uuid.uuid4().hex, tmp_path / "log"
        (port,) = find_free_ports(1)
        command = [str(Path(sys.executable).with_name("warmstate")), "serve", str(checkpoint), "--port", str(port)]
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {MARK: mark},
            )
        try:
            time.sleep(delay_s)
            os.killpg(process.pid, number)
            process.wait(END_TIMEOUT_S)
            told = log_file.read_text(errors="replace")
            assert "Traceback" not in told, f"after {delay_s} s: {told}"
            # Whoever was killed outright could wait for nobody.
            deadline = time.monotonic() + (END_TIMEOUT_S if number is signal.SIGKILL else 0)
            while (left := processes_with(mark)) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert left == [], f"after {delay_s} s"
        finally:
            for process_left in processes_with(mark):
                process_left.kill()

    return run


def test_it_ends_at_a_few_moments(interrupt: Interrupt) -> None:
    rng = random.Random()
    for moment_s in (0.3, 1.0, 2.5, 6.0):
        interrupt(moment_s + rng.random(), signal.SIGINT)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_it_ends_at_many_moments(interrupt: Interrupt) -> None:
    rng = random.Random(1)
    for _ in range(60):
        interrupt(rng.uniform(EARLIEST_S, 4.0), signal.SIGINT)
    for number in [signal.SIGINT] * 12 + [signal.SIGTERM] * 6 + [signal.SIGKILL] * 6:
        interrupt(rng.uniform(EARLIEST_S, LATEST_S), number)
