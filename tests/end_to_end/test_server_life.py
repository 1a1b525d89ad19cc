"""How the command ends: whatever stops it, and whenever, no process remains. (Ctrl-C: the shared server's end.)"""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster


def run_directory(server: Any) -> Path:
    """Where Ray keeps its files, as the command line of its first process tells it."""
    (gcs,) = server.processes("gcs_server")
    found = re.search(r"--log_dir=(/tmp/warmstate-[^/]+)", " ".join(gcs.cmdline()))
    assert found is not None
    return Path(found[1])


def test_terminating_it_while_it_starts_leaves_nothing(private_server: Any, eventually: Callable[..., None]) -> None:
    eventually(lambda: len(private_server.processes("gcs_server")) == 1, 60)
    directory = run_directory(private_server)
    assert directory.is_dir()
    private_server.stop(signal.SIGTERM)
    assert not directory.exists()


@pytest.mark.long
def test_killing_it_outright_leaves_nothing(private_server: Any) -> None:
    private_server.wait_until_ready(1)
    private_server.stop(signal.SIGKILL)


@pytest.mark.long
def test_it_serves_and_ends_without_a_store(private_server: Any) -> None:
    private_server.wait_until_ready(1)
    assert private_server.complete("hello", max_tokens=2).status_code == 200
    directory = run_directory(private_server)
    assert private_server.stop(signal.SIGTERM) == 0
    assert not directory.exists()
