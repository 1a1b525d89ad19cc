"""What the HTTP path costs: warmstate over HTTP, less the time of its engine, beside a bare two-hop Ray Serve echo.

    python tests/bench/bench_http.py [--rounds 5]

Both applications run at once on this machine and are measured in turns at concurrency 1, so that drift hits both.
Per request: a 1-token completion, not streamed. Per token: a streamed 256-token reply, divided by 256. What the engines
spent in steps meanwhile, by their own count, is taken off warmstate's figure.
"""

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint

HERE = Path(__file__).resolve().parent
NUM_TOKENS = 256
NUM_REQUESTS = 40
BODY = {"model": "bench", "messages": [{"role": "user", "content": "hello"}], "ignore_eos": True, "temperature": 0}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], base_url: str, env: dict[str, str]) -> Iterator[None]:
    """Starts a server, waits until it answers a request, and stops it with SIGINT."""
    process = subprocess.Popen(command, env=os.environ | env, stdout=subprocess.DEVNULL, cwd=HERE)
    try:
        for _ in range(240):
            if process.poll() is not None:
                raise SystemExit(f"{command} ended with {process.returncode}")
            try:
                if httpx.post(f"{base_url}/v1/chat/completions", json=BODY | {"max_tokens": 1}, timeout=5).is_success:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(2)
        process.wait(60)


def request_seconds(client: httpx.Client) -> float:
    """Mean seconds of a 1-token request that is not streamed."""
    start = time.perf_counter()
    for _ in range(NUM_REQUESTS):
        client.post("/v1/chat/completions", json=BODY | {"max_tokens": 1}).raise_for_status()
    return (time.perf_counter() - start) / NUM_REQUESTS


def token_seconds(client: httpx.Client) -> float:
    """Seconds per token of one streamed reply."""
    start = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=BODY | {"max_tokens": NUM_TOKENS, "stream": True}) as reply:
        reply.raise_for_status()
        reply.read()
    return (time.perf_counter() - start) / NUM_TOKENS


def engine_seconds(client: httpx.Client) -> float:
    """What the engines of the replicas have spent in steps so far, by their own count."""
    # Replicas report once a second.
    time.sleep(2.5)
    text = client.get("/metrics").text
    return sum(float(value) for value in re.findall(r"^warmstate:engine_step_seconds\{.*\} (\S+)$", text, re.MULTILINE))


def beside_engine(client: httpx.Client, measure: Callable[[httpx.Client], float], count: int) -> tuple[float, float]:
    """Seconds per unit of one measurement of `count` units, and those of them that the engine spent."""
    before = engine_seconds(client)
    seconds = measure(client)
    return seconds, (engine_seconds(client) - before) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    serve_env = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "bench"
        write_demo_checkpoint(model, size="tiny")
        ours_port, echo_port = free_port(), free_port()
        ours_url, echo_url = f"http://127.0.0.1:{ours_port}", f"http://127.0.0.1:{echo_port}"
        cli = str(Path(sys.executable).parent / "warmstate")
        ours = [cli, "serve", str(model), "--replicas", "2", "--port", str(ours_port), "--served-model-name", "bench"]
        echo = [sys.executable, str(HERE / "run_echo.py"), str(echo_port)]
        with running(ours, ours_url, {}), running(echo, echo_url, serve_env):
            timeout = httpx.Timeout(120)
            with (
                httpx.Client(base_url=ours_url, timeout=timeout) as a,
                httpx.Client(base_url=echo_url, timeout=timeout) as b,
            ):
                for measure, count, name in (
                    (request_seconds, NUM_REQUESTS, "ms per request"),
                    (token_seconds, NUM_TOKENS, "ms per streamed token"),
                ):
                    rows = [(*beside_engine(a, measure, count), measure(b)) for _ in range(rounds)]
                    report(name, rows)


def report(name: str, rows: list[tuple[float, float, float]]) -> None:
    """Prints medians of (warmstate, its engine, echo) over the rounds, and of what is left for the HTTP path."""
    ours, engine, echo = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
    over = statistics.median(mine - own - floor for mine, own, floor in rows) * 1e3
    print(f"{name:22} warmstate {ours:7.3f}, of it engine {engine:7.3f}; echo {echo:7.3f}; over echo {over:7.3f}")


if __name__ == "__main__":
    main()
