"""Owns the server under test: how it is started, its processes and its figures."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

NUM_REPLICAS = 2
START_TIMEOUT_S = 180


class SoakedServer:
    """`warmstate serve` and everything below it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_file: Path) -> None:
        self.http = httpx.Client(base_url=url, timeout=120)
        self._process = process
        self._log_file = log_file

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Its processes whose title or command line begins with `title`."""
        found = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in found if title_of(process).startswith(title)]

    def num_ready(self) -> int:
        try:
            phases = self.http.get("/health").json()["replicas"].values()
        except (httpx.HTTPError, ValueError, KeyError):
            return 0
        return sum(phase["phase"] == "ready" for phase in phases)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.num_ready() < NUM_REPLICAS:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{NUM_REPLICAS} replicas were expected: {self._log_file.read_text()}")
            time.sleep(0.5)

    def figures(self) -> dict[str, float]:
        """Every figure of the replicas, summed over them."""
        sums: dict[str, float] = {}
        pattern = r"^(?:vllm:|warmstate:)(\w+?)(?:_total)?\{.*replica=.*\} (\S+)$"
        for name, value in re.findall(pattern, self.http.get("/metrics").text, re.MULTILINE):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def stop(self) -> None:
        descendants = self.processes()
        self.http.close()
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)
        _, remaining = psutil.wait_procs(descendants, timeout=30)
        if remaining:
            raise SystemExit(f"still there after the end: {[title_of(process) for process in remaining]}")


@contextmanager
def running(config: Mapping[str, Any], directory: Path) -> Iterator[SoakedServer]:
    """A server of this configuration, with `http.port` chosen here, from ready until the end of the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    file, log_file = directory / "config.yaml", directory / "log"
    file.write_text(yaml.safe_dump({**config, "http": {"port": port}, "replicas": NUM_REPLICAS}))
    command = [sys.executable, "-m", "warmstate.cluster.main", "serve", "--config", str(file)]
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        server = SoakedServer(process, f"http://127.0.0.1:{port}", log_file)
        server.wait_until_ready()
        yield server
        server.stop()
    finally:
        process.terminate()
        process.wait(60)


def title_of(process: psutil.Process) -> str:
    """Ray and Valkey write what a process is into its command line; empty once it is gone."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return f"{Path(words[0]).name} {' '.join(words[1:])}".strip() if words else ""
