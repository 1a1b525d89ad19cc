"""The loading bar on a terminal and in a log."""

import io
import logging

import pytest

from warmstate.models.checkpoints.progress import LoadingBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_per_tenth(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO), LoadingBar("weights", stream) as bar:
        for done in range(0, 1001, 7):
            bar(done, 1000)
        bar(1000, 1000)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 10
    assert lines[0].startswith("weights: 10 % of")
    assert lines[-1].startswith("weights: 100 % of")
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_that_ends_full(caplog: pytest.LogCaptureFixture) -> None:
    stream = Terminal()
    with caplog.at_level(logging.INFO), LoadingBar("weights", stream) as bar:
        bar(400, 1000)
        bar(1000, 1000)
    assert not caplog.records
    assert stream.getvalue().rstrip().split("\r")[-1].startswith("weights: 100%")


def test_an_empty_checkpoint_is_done_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LoadingBar("weights", io.StringIO())(0, 0)
    assert "100 %" in caplog.text
