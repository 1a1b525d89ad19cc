"""The real HAProxy with the configuration that Serve writes, in each state that the API can be in. Starts no Ray."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import psutil
import pytest

from warmstate.cluster.api.health import health_report
from warmstate.cluster.api.responses import error_fields as api_error_fields
from warmstate.cluster.errors import NotLoaded, ReplicaLost
from warmstate.cluster.launch import front_proxy
from warmstate.cluster.launch.ports import find_free_ports

Proxy = Callable[..., httpx.Client]

# In a process of its own, because importing Ray Serve warns.
WRITE_CONFIG = """
import json, sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

file, port, stats, metrics, servers, fallback = json.loads(sys.argv[1])
config = HAProxyConfig(
    socket_path=f"{file}.sock",
    http_options=HTTPOptions(host="127.0.0.1", port=port),
    grpc_options=gRPCOptions(),
    is_head=True,
    stats_port=stats,
    metrics_port=metrics,
    enable_hap_optimization=False,
)
backend = BackendConfig(
    name="http-warmstate",
    path_prefix="/",
    app_name="warmstate",
    servers=[ServerConfig(f"server-{port}", "127.0.0.1", port) for port in servers or ()],
    fallback_server=None if fallback is None else ServerConfig("fallback", "127.0.0.1", fallback),
)
api = HAProxyApi(config, {} if servers is None else {backend.name: backend}, file)
api._generate_config_file_internal()
"""


class Teapot(BaseHTTPRequestHandler):
    """An API that can be told by its answer. It never answers a POST, and notes each whose client has left."""

    abandoned: ClassVar = threading.Semaphore(0)

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/-/healthz" else 418)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        with contextlib.suppress(ConnectionResetError):
            self.rfile.read(1)
        self.abandoned.release()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api_port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Teapot) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    """Starts it in front of an API with these servers, None being an application that Serve does not know yet; gives
    a client of it."""
    running: list[subprocess.Popen[bytes]] = []
    clients: list[httpx.Client] = []

    def start(servers: list[int] | None, fallback: int | None = None) -> httpx.Client:
        for process in running:
            process.kill()
            process.wait()
        port, stats, metrics = find_free_ports(3)
        file = str(tmp_path / "haproxy.cfg")
        state = json.dumps([file, port, stats, metrics, servers, fallback])
        subprocess.run([sys.executable, "-c", WRITE_CONFIG, state], check=True, capture_output=True)
        command = [sys.executable, "-m", front_proxy.__name__, "-db", "-f", file]
        running.append(subprocess.Popen(command))
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)
        clients.append(client)
        _wait_until_it_answers(client)
        return client

    yield start
    for client in clients:
        client.close()
    for process in running:
        process.kill()
        process.wait()


def _wait_until_it_answers(client: httpx.Client) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            client.get("/-/healthz")
            return
        except httpx.ConnectError:
            assert time.monotonic() < deadline, "HAProxy did not come up"
            time.sleep(0.02)


def check_api_is_away(client: httpx.Client) -> None:
    for path in ("/v1/models", "/v1/chat/completions"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json() == front_proxy.error_fields(503)
    check_health_is_told(client)


def check_health_is_told(client: httpx.Client) -> None:
    answer = client.get("/health")
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/json")
    assert answer.json() == health_report({}).fields()


def test_before_there_is_an_application_everything_is_503(proxy: Proxy) -> None:
    check_api_is_away(proxy(None))


def test_while_the_api_starts_nothing_is_held_back(proxy: Proxy, api_port: int) -> None:
    check_api_is_away(proxy([], fallback=api_port))


def test_the_api_answers_once_it_is_there(proxy: Proxy, api_port: int) -> None:
    client = proxy([api_port])
    assert client.get("/health").status_code == 418
    assert client.get("/v1/models").status_code == 418


def test_requests_wait_for_an_api_that_was_there_but_health_is_told(proxy: Proxy, api_port: int) -> None:
    (dead,) = find_free_ports(1)
    proxy([dead])
    client = proxy([], fallback=api_port)
    assert client.get("/v1/models").status_code == 418
    check_health_is_told(client)


def test_an_api_that_does_not_answer_is_503_in_the_apis_shape(proxy: Proxy) -> None:
    (dead,) = find_free_ports(1)
    answer = proxy([dead]).get("/v1/models")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json() == front_proxy.error_fields(503)


def test_the_api_hears_of_clients_that_leave_before_they_are_answered(proxy: Proxy, api_port: int) -> None:
    address = ("127.0.0.1", proxy([api_port]).base_url.port or 0)
    for _ in range(12):
        with socket.create_connection(address) as client:
            client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n")
            # Real clients send the body in a packet of its own; HAProxy has the headers under way by then.
            time.sleep(0.02)
            client.sendall(b"x")
            time.sleep(0.05)
    for _ in range(12):
        assert Teapot.abandoned.acquire(timeout=10)


def test_nothing_of_it_listens_beyond_the_loopback_interface(proxy: Proxy) -> None:
    proxy(None)
    addresses = [c.laddr.ip for child in psutil.Process().children() for c in child.net_connections("tcp") if c.laddr]
    assert set(addresses) == {"127.0.0.1"}
    assert len(addresses) >= 3


@pytest.mark.parametrize("kind", [NotLoaded, ReplicaLost])
def test_its_errors_have_the_apis_fields(kind: type[NotLoaded | ReplicaLost]) -> None:
    fields = front_proxy.error_fields(kind.status)
    assert fields == api_error_fields(kind(fields["error"]["message"]))
