"""What the real server says at its terminal and in Serve's log files."""

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster


def serve_log(server: Any, replica_id: str) -> str:
    """The file that Serve keeps of a replica."""
    found = re.search(r"^logs: (\S+)$", server.log, re.MULTILINE)
    assert found is not None
    (file,) = (Path(found[1]) / "serve").glob(f"replica_warmstate_replica_{replica_id}.log")
    return file.read_text()


def test_at_its_start_it_says_what_it_uses(server: Any, replica_ids: list[str]) -> None:
    for words in ("store: the embedded store listens at redis://", "ingress: the store answers", ": kernel linear: "):
        assert server.log.count(words) == 1, server.log
    # Once, where both took equally long.
    assert any(f"INFO replica {replica_id}: ready after" in server.log for replica_id in replica_ids)
    for replica_id in replica_ids:
        told = serve_log(server, replica_id)
        for words in ("memory: weights", "kernel linear: ", "ready after"):
            assert words in told


def test_a_field_that_is_ignored_is_told_once(server: Any, eventually: Callable[..., None]) -> None:
    for _ in range(2):
        assert server.complete("x", max_tokens=1, from_the_future=1).status_code == 200
    eventually(lambda: "INFO ingress: request field 'from_the_future' is not known" in server.log)
    assert server.log.count("from_the_future") == 1


def test_at_debug_it_says_why_a_prefix_was_fetched(
    server: Any, replica_ids: list[str], eventually: Callable[..., None]
) -> None:
    first, second = replica_ids[:2]
    numbers = itertools.count()
    decided = re.compile(
        rf"DEBUG replica {second}: request \S+: fetch \d+ \(always\): tokens=\d+ local=0 stored=\d+:\d+B"
    )

    def is_told() -> bool:
        # A prompt of its own each time: what came before it was published is local from then on.
        prompt = f"{next(numbers)}: why fetch this, and not compute it? " * 12
        server.complete(prompt, first, max_tokens=1)
        time.sleep(0.5)
        server.complete(f"{prompt}!", second, max_tokens=1)
        return decided.search(server.log) is not None

    eventually(is_told)
