"""`serve run` brings up what `warmstate serve` does, from the configuration in the repository."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
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
def serve_run(config_file: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {
        "RAY_ADDRESS": "local",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).with_name("warmstate-haproxy")),
    }
    command = [str(Path(sys.executable).with_name("serve")), "run", str(config_file)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()


def test_the_local_configuration_serves_a_chat_and_leaves_nothing(
    serve_run: subprocess.Popen[bytes], config_file: Path, tmp_path: Path
) -> None:
    port = yaml.safe_load(config_file.read_text())["http_options"]["port"]
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        while not _is_ready(http):
            assert serve_run.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3}
        answer = http.post("/v1/chat/completions", json=body)
        replicas = http.get("/health").json()["replicas"]
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-warmstate-replica"] in replicas
    descendants = psutil.Process(serve_run.pid).children(recursive=True)
    serve_run.send_signal(signal.SIGINT)
    serve_run.wait(60)
    _, remaining = psutil.wait_procs(descendants, timeout=30)
    assert not remaining


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
