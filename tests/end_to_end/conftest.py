"""A real `warmstate serve`: a process of its own, two replicas, a tiny float32 model, the embedded store."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60
ORPHAN_TIMEOUT_S = 30
SETTLED_S = 2.5
REPLICA_HEADER = "x-warmstate-replica"


class Server:
    """The command and the ways to talk to it."""

    def __init__(self, log_file: Path, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = log_file
        command = [str(Path(sys.executable).with_name("warmstate")), "serve", *arguments, "--port", str(self.port)]
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.early_answers: list[tuple[str, httpx.Response]] = []
        self.http = httpx.Client(base_url=self.url, timeout=120, limits=httpx.Limits(max_connections=64))

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def record_early_answers(self) -> None:
        """Asks again and again, from now on until the server is ready, for the health and the models."""
        threading.Thread(target=self._record_early_answers, daemon=True).start()

    def _record_early_answers(self) -> None:
        with httpx.Client(base_url=self.url, timeout=120) as http:
            while self.process.poll() is None and "ready: http" not in self.log:
                for path in ("/health", "/v1/models"):
                    try:
                        self.early_answers.append((path, http.get(path)))
                    except httpx.ConnectError:
                        time.sleep(0.02)

    def wait_until_ready(self, num_replicas: int) -> list[str]:
        """Waits for the greeting and for so many ready replicas; returns their ids."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while "ready: http" not in self.log:
            assert self.process.poll() is None, f"the server ended: {self.log}"
            assert time.monotonic() < deadline, f"not ready in time: {self.log}"
            time.sleep(0.1)
        while len(ids := self.ready_ids()) < num_replicas:
            assert time.monotonic() < deadline, f"{ids} are ready, {num_replicas} were expected"
            time.sleep(0.2)
        return ids

    def ready_ids(self) -> list[str]:
        replicas = self.http.get("/health").json()["replicas"]
        return [replica_id for replica_id, phase in replicas.items() if phase["phase"] == "ready"]

    def complete(self, prompt: str | list[int], replica_id: str | None = None, **fields: Any) -> httpx.Response:
        """One plain completion, greedy unless `fields` say otherwise."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        headers = {} if replica_id is None else {REPLICA_HEADER: replica_id}
        return self.http.post("/v1/completions", json=body, headers=headers)

    def metric(self, name: str, replica_id: str | None = None, reason: str | None = None) -> float:
        """The sum of a metric over all replicas and reasons, or its value at one."""
        text = self.http.get("/metrics").text
        lines = re.findall(rf"^(?:vllm:|warmstate:){re.escape(name)}(?:_total)?(\{{.*\}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'"{value}"' for value in (replica_id, reason) if value is not None]
        return sum(float(value) for labels, value in lines if all(label in labels for label in wanted))

    def settled_metric(self, name: str, replica_id: str | None = None) -> float:
        """The same, once it has stood still for longer than the second between two reports of a replica."""
        value, since = self.metric(name, replica_id), time.monotonic()
        while time.monotonic() < since + SETTLED_S:
            time.sleep(0.2)
            if (now := self.metric(name, replica_id)) != value:
                value, since = now, time.monotonic()
        return value

    def processes(self, name: str) -> list[psutil.Process]:
        """Those of the server's processes whose title or command line begins with `name`."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if _title(process).startswith(name)]

    def stop(self, number: signal.Signals) -> int:
        """Sends a signal to the whole process group, as a terminal does; fails when a process of the server remains."""
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, number)
        code = self.process.wait(STOP_TIMEOUT_S)
        gone, remaining = psutil.wait_procs(descendants, timeout=ORPHAN_TIMEOUT_S)
        assert not remaining, f"still there: {[_title(process) for process in remaining]}"
        assert len(gone) > 1
        self.http.close()
        return code


def _title(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return f"{Path(words[0]).name} {' '.join(words[1:])}".strip() if words else ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "demo"
    write_demo_checkpoint(directory, dtype=torch.float32)
    return directory


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Shared by all tests; one that kills a replica leaves it to the next to wait for its successor."""
    folder = tmp_path_factory.mktemp("server")
    config = folder / "config.yaml"
    # So small a model is computed faster than fetched when the machine is busy with other things.
    config.write_text("cache: {fetch_policy: always}\nlog_level: debug")
    running = Server(folder / "log", str(checkpoint), "--replicas", "2", "--config", str(config))
    try:
        running.record_early_answers()
        running.wait_until_ready(2)
        yield running
        assert running.stop(signal.SIGINT) == 0, running.log
    finally:
        running.process.kill()


@pytest.fixture(scope="session")
def start_server(checkpoint: Path) -> Callable[..., Server]:
    """Starts one more server with these options of the command; whoever does must stop it."""
    return lambda log_file, *options: Server(log_file, str(checkpoint), *options)


@pytest.fixture
def private_server(checkpoint: Path, tmp_path: Path) -> Iterator[Server]:
    """One replica and no store, for tests of how it ends; not yet ready."""
    running = Server(tmp_path / "log", str(checkpoint), "--replicas", "1", "--no-store")
    try:
        yield running
    finally:
        running.process.kill()


@pytest.fixture
def replica_ids(server: Server) -> list[str]:
    return server.wait_until_ready(2)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits for something to become true, for what is told once a second."""

    def wait(condition: Callable[[], bool], timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not become true in time"
            time.sleep(0.1)

    return wait
