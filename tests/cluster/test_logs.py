import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from warmstate.cluster.launch.logs import LogFollower

LOG = """
import logging, sys
from warmstate.cluster.launch.logs import set_up_logging

set_up_logging(sys.argv[1], "tester")
set_up_logging(sys.argv[1], "tester")
log = logging.getLogger("warmstate.replicas.something")
for level in (logging.DEBUG, logging.INFO, logging.WARNING):
    log.log(level, "at %s", logging.getLevelName(level))
logging.getLogger("somebody.else").info("not ours")
"""


@pytest.fixture
def follow(tmp_path: Path) -> Callable[..., list[str]]:
    """Appends to a followed file, at a time; gives what was shown of it."""
    file, shown, now = tmp_path / "log", list[str](), [0.0]
    follower = LogFollower(file, shown.append, clock=lambda: now[0])

    def write(text: str, at_s: float = 0.0) -> list[str]:
        now[0] = at_s
        with file.open("a") as out:
            out.write(text)
        shown.clear()
        follower.show_new()
        return list(shown)

    return write


@pytest.mark.parametrize(("level", "num_lines"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
@pytest.mark.parametrize("to_file", [True, False])
def test_our_lines_from_the_level_on_are_written_once_with_their_source(
    tmp_path: Path, level: str, num_lines: int, to_file: bool
) -> None:
    file = tmp_path / "log"
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / ".types")}
    if to_file:
        environment["WARMSTATE_LOG_FILE"] = str(file)
    command = [sys.executable, "-c", LOG, level]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    written = (file.read_text() if file.exists() else "") if to_file else result.stderr
    lines = written.splitlines()
    names = ["DEBUG", "INFO", "WARNING"][3 - num_lines :] if num_lines else []
    assert [line[len("00:00:00 ") :] for line in lines] == [f"{name} tester: at {name}" for name in names]


def test_what_several_processes_say_alike_is_shown_once(follow: Callable[..., list[str]]) -> None:
    assert follow("10:00:00 INFO replica a: kernel: fast\n") == ["10:00:00 INFO replica a: kernel: fast"]
    assert follow("10:00:01 INFO replica b: kernel: fast\n", at_s=1) == []
    assert len(follow("10:00:02 INFO replica a: kernel: fast\n", at_s=2)) == 1
    assert len(follow("10:02:00 INFO replica b: kernel: fast\n", at_s=120)) == 1


def test_a_line_is_shown_when_it_is_whole(follow: Callable[..., list[str]]) -> None:
    assert follow("10:00:00 INFO a: one\n10:00:00 INFO a: t") == ["10:00:00 INFO a: one"]
    assert follow("wo\nnot ours\n") == ["10:00:00 INFO a: two", "not ours"]
