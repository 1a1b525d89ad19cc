"""What the HTTP path costs: warmstate beside a bare two-hop echo, both in one Ray Serve on this machine.

    python tests/bench/bench_http.py [--rounds 5] [--model null|real]

Measured in turns at concurrency 1, so that drift hits both. Per request: a chat of 1 token, not streamed. Per token: a
streamed reply of 256 tokens, divided by 256. With `null` (default) the model computes nothing, as the echo's does not,
and all the rest is warmstate's: HTTP, template, tokenizer, router, engine, sampler. With `real` a tiny model computes,
and what the engines spent in steps, by their own count, is taken off; they share the cores and the interpreter with the
rest, so that count holds some of what it is to be told from.
"""

import argparse
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
NUM_REQUESTS = 100
BODY = {"model": "bench", "messages": [{"role": "user", "content": "hello"}], "ignore_eos": True, "temperature": 0}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(model: str) -> Iterator[str]:
    """The server's URL, once both applications answer; stopped with SIGINT."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "bench"
        write_demo_checkpoint(checkpoint, size="tiny")
        port = free_port()
        command = [sys.executable, str(HERE / "run_http_bench.py"), str(checkpoint), str(port), model]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=HERE, text=True) as process:
            assert process.stdout is not None
            if not any(line == "ready\n" for line in process.stdout):
                raise SystemExit(f"the server ended with {process.wait()}")
            yield f"http://127.0.0.1:{port}"
            process.send_signal(2)


class Target:
    """One of the two applications."""

    def __init__(self, client: httpx.Client, prefix: str) -> None:
        self._client = client
        self._url = f"{prefix}/v1/chat/completions"

    def request_seconds(self) -> float:
        """Mean seconds of a 1-token request that is not streamed."""
        start = time.perf_counter()
        for _ in range(NUM_REQUESTS):
            self._client.post(self._url, json=BODY | {"max_tokens": 1}).raise_for_status()
        return (time.perf_counter() - start) / NUM_REQUESTS

    def token_seconds(self) -> float:
        """Seconds per token of one streamed reply."""
        body = BODY | {"max_tokens": NUM_TOKENS, "stream": True}
        start = time.perf_counter()
        with self._client.stream("POST", self._url, json=body) as reply:
            reply.raise_for_status()
            reply.read()
        return (time.perf_counter() - start) / NUM_TOKENS

    def engine_seconds(self) -> float:
        """What the engines of the replicas have spent in steps so far, by their own count."""
        # Replicas report once a second.
        time.sleep(2.5)
        pattern = r"^warmstate:engine_step_seconds_total\{.*\} (\S+)$"
        return sum(float(value) for value in re.findall(pattern, self._client.get("/metrics").text, re.MULTILINE))


def beside_engine(target: Target, measure: Callable[[], float], count: int) -> tuple[float, float]:
    """Seconds per unit of one measurement of `count` units, and those of them that the engine spent."""
    before = target.engine_seconds()
    seconds = measure()
    return seconds, (target.engine_seconds() - before) / count


def report(name: str, rows: list[tuple[float, float, float]]) -> None:
    """Prints medians of (warmstate, its engine, echo) over the rounds, and of what is left for the HTTP path."""
    ours, engine, echo = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
    over = statistics.median(mine - own - floor for mine, own, floor in rows) * 1e3
    print(f"{name:22} warmstate {ours:7.3f}, of it engine {engine:7.3f}; echo {echo:7.3f}; over echo {over:7.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=("null", "real"), default="null")
    options = parser.parse_args()
    with running(options.model) as url, httpx.Client(base_url=url, timeout=120) as client:
        ours, echo = Target(client, ""), Target(client, "/echo")
        for _ in range(NUM_REQUESTS // 10):
            client.post("/v1/chat/completions", json=BODY | {"max_tokens": 8}).raise_for_status()
        for name, count in (("request", NUM_REQUESTS), ("token", NUM_TOKENS)):
            rows = [measured(ours, echo, f"{name}_seconds", count, options.model) for _ in range(options.rounds)]
            report(f"ms per {name}", rows)


def measured(ours: Target, echo: Target, what: str, count: int, model: str) -> tuple[float, float, float]:
    """Seconds per unit of warmstate, of its engine (0 for the null model: it is part of the path), and of the echo."""
    if model == "null":
        return getattr(ours, what)(), 0.0, getattr(echo, what)()
    return (*beside_engine(ours, getattr(ours, what), count), getattr(echo, what)())


if __name__ == "__main__":
    main()
