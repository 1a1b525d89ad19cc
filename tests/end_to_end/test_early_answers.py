"""What a client hears of the real server before it is ready, and who else could reach it."""

from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.cluster


def test_until_it_is_ready_it_says_so_in_the_apis_words(server: Any) -> None:
    early = [(path, answer) for path, answer in server.early_answers if answer.status_code != 200]
    assert {path for path, _ in early} == {"/health", "/v1/models"}
    for path, answer in early:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), (path, answer.text)
        if path == "/health":
            assert answer.json()["phase"] in ("loading", "warming")
            assert 0 <= answer.json()["fraction"] <= 1
        else:
            assert answer.json()["error"]["type"] == "service_unavailable"


def test_no_early_answer_is_held_back(server: Any) -> None:
    assert max(answer.elapsed.total_seconds() for _, answer in server.early_answers) < 3


def test_it_listens_on_the_loopback_interface_alone(server: Any) -> None:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    listening = {
        (process.name(), connection.laddr.ip)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) > 5
    assert {ip for _, ip in listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, listening
