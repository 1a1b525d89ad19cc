"""What the HTTP path costs: warmstate over HTTP, less its engine in process, beside a bare two-hop Serve echo.

    python tests/bench/bench_http.py [--rounds 5]

Both applications run at once on this machine and are measured in turns at concurrency 1, so that drift hits both.
Per request: a 1-token completion, not streamed. Per token: the rest of a streamed 256-token reply, divided by 255.
The engine's own time is measured in this process with the same model, and taken off warmstate's figure.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import torch

from warmstate.cache_store.keys import chain_root
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint
from warmstate.replicas.config import EngineConfig, ReplicaConfig
from warmstate.replicas.messages import GenerateRequest, SamplingParams
from warmstate.replicas.service import ReplicaService

HERE = Path(__file__).resolve().parent
NUM_TOKENS = 256
PROMPT_TOKENS = 20
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


def request_seconds(client: httpx.Client, count: int = 40) -> float:
    """Median seconds of a 1-token request that is not streamed."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        client.post("/v1/chat/completions", json=BODY | {"max_tokens": 1}).raise_for_status()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def token_seconds(client: httpx.Client) -> float:
    """Seconds per token of one streamed reply, first token excluded."""
    arrivals = []
    with client.stream("POST", "/v1/chat/completions", json=BODY | {"max_tokens": NUM_TOKENS, "stream": True}) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.perf_counter())
    return (arrivals[-1] - arrivals[0]) / (NUM_TOKENS - 1)


async def engine_seconds(model: Path) -> tuple[float, float]:
    """The same work without HTTP: median seconds of a 1-token request, and per further token of a long one."""
    config = ReplicaConfig(model, torch.bfloat16, False, 1, EngineConfig(max_model_len=4096))
    service = ReplicaService(config, "bench")
    await service.start()

    async def seconds(number: int, max_tokens: int) -> float:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
        start = time.perf_counter()
        async for _ in service.generate(GenerateRequest(f"{number}-{max_tokens}", prompt, sampling, chain_root(), b"")):
            pass
        return time.perf_counter() - start

    one = statistics.median([await seconds(i, 1) for i in range(40)])
    many = statistics.median([await seconds(i, NUM_TOKENS) for i in range(5)])
    await service.close()
    return one, (many - one) / (NUM_TOKENS - 1)


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
            rows = []
            with httpx.Client(base_url=ours_url) as a, httpx.Client(base_url=echo_url) as b:
                for _ in range(rounds):
                    rows.append((request_seconds(a), request_seconds(b), token_seconds(a), token_seconds(b)))
        engine_request, engine_token = asyncio.run(engine_seconds(model))
    medians = [statistics.median(column) * 1e3 for column in zip(*rows, strict=True)]
    ours_request, echo_request, ours_token, echo_token = medians
    engine_request_ms, engine_token_ms = engine_request * 1e3, engine_token * 1e3
    print(f"{'':22}{'warmstate':>12}{'its engine':>12}{'echo':>10}{'HTTP path over echo':>22}")
    for name, mine, engine, floor in (
        ("ms per request", ours_request, engine_request_ms, echo_request),
        ("ms per streamed token", ours_token, engine_token_ms, echo_token),
    ):
        print(f"{name:22}{mine:12.3f}{engine:12.3f}{floor:10.3f}{mine - engine - floor:22.3f}")
    print(json.dumps({"rounds": rounds, "rows_s": rows, "engine_s": [engine_request, engine_token]}))


if __name__ == "__main__":
    main()
