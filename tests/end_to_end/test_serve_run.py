"""`serve run` brings up what `warmstate serve` does, from the configuration in the repository."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SHIPPED = Path(__file__).resolve().parents[2] / "cluster" / "configs" / "local.yaml"
START_TIMEOUT_S = 120


@pytest.fixture
def config_file(checkpoint: Path, tmp_path: Path) -> Path:
    """local.yaml with a free port and the checkpoint of these tests."""
    values = yaml.safe_load(SHIPPED.read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        values["http_options"]["port"] = probe.getsockname()[1]
    values["applications"][0]["args"]["model"]["path"] = str(checkpoint)
    file = tmp_path / "local.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture
def serve_run(config_file: Path, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the command with the configuration as it is then."""
    environment = os.environ | {
        "RAY_ADDRESS": "local",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).with_name("warmstate-haproxy")),
    }
    command = [str(Path(sys.executable).with_name("serve")), "run", str(config_file)]
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()


def test_the_local_configuration_serves_a_chat_and_leaves_nothing(
    serve_run: Callable[[], subprocess.Popen[bytes]], config_file: Path, tmp_path: Path
) -> None:
    process = serve_run()
    port = yaml.safe_load(config_file.read_text())["http_options"]["port"]
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        while not _is_ready(http):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3}
        answer = http.post("/v1/chat/completions", json=body)
        replicas = http.get("/health").json()["replicas"]
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-warmstate-replica"] in replicas
    stop(process)


def test_a_damaged_checkpoint_fails_the_deployment_once(
    serve_run: Callable[[], subprocess.Popen[bytes]], config_file: Path, checkpoint: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    shard = next(damaged.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)
    config_file.write_text(config_file.read_text().replace(str(checkpoint), str(damaged)))
    process = serve_run()
    log, told = tmp_path / "log", "build: the application cannot be served: "
    deadline = time.monotonic() + START_TIMEOUT_S
    while told not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    # Long enough for a second try, which takes seconds.
    time.sleep(15)
    assert log.read_text().count(told) == 1
    assert f"{shard.name}: tensor" in log.read_text()
    assert "retries remaining" not in log.read_text()
    stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C; nothing may remain."""
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    _, remaining = psutil.wait_procs(descendants, timeout=30)
    assert not remaining


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
