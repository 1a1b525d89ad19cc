"""Seconds to the first token over HTTP: nothing known, known to this replica, known to another process only.

    python tests/bench/bench_ttft.py [--lengths 2048 8192 32768] [--layers 24] [--rounds 1]

Serves the Qwen3.5-0.8B dense shape in bfloat16 with random weights on two replicas that share the embedded store, one
of which is idle while the other is asked. Each length is a prefix, followed by a question of 32 tokens: asked first of
one replica (cold), then with another question of the same (local), then with a third of the other (store), which has
never seen it; the replicas are named by the header and checked by it, as is the number of cached tokens.

With fewer layers than 24 computing and restoring shrink alike, while HTTP, the embedding and the head stay as they
are: the ratios are then worse than those of the whole model, and not better.
"""

import argparse
import json
import random
import re
import signal
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
import yaml

from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint

HEADER = "x-warmstate-replica"
QUESTION_TOKENS = 32
START_TIMEOUT_S = 600
REQUEST_TIMEOUT_S = 3600


@contextmanager
def running(model: Path, longest: int) -> Iterator[httpx.Client]:
    """A server with two ready replicas, each with all cores: only one of them works at a time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    config = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "engine": {"max_model_len": longest + 512, "kv_tokens": longest + 2048, "num_threads": 2},
        "store": {"maxmemory": "3GiB"},
        "http": {"port": port},
    }
    file = model.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "warmstate.cluster.main", "serve", "--config", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_TIMEOUT_S) as http:
            deadline = time.monotonic() + START_TIMEOUT_S
            while len(ready_replicas(http)) < 2:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server did not start")
                time.sleep(0.5)
            yield http
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def ready_replicas(http: httpx.Client) -> list[str]:
    try:
        replicas = http.get("/health").json()["replicas"]
    except (httpx.TransportError, ValueError, KeyError):
        return []
    return sorted(name for name, phase in replicas.items() if phase["phase"] == "ready")


def first_token(http: httpx.Client, prompt: list[int], replica_id: str, expected_cached: int) -> float:
    """Seconds until the first token arrives from this replica; ends the run if it was not as warm as expected."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    seconds, cached = 0.0, -1
    started = time.perf_counter()
    with http.stream("POST", "/v1/completions", json=body, headers={HEADER: replica_id}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line or line.endswith("[DONE]"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not seconds and chunk["choices"] and chunk["choices"][0].get("token_ids"):
                seconds = time.perf_counter() - started
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
        if (response.headers[HEADER], cached) != (replica_id, expected_cached):
            raise SystemExit(f"{response.headers[HEADER]} answered with {cached} cached tokens, not {expected_cached}")
    return seconds


def wait_until_published(http: httpx.Client, num_before: float) -> float:
    """Waits for one more checkpoint in the store; returns how many there are."""
    while (num_now := num_published(http)) <= num_before:
        time.sleep(0.2)
    return num_now


def num_published(http: httpx.Client) -> float:
    found = re.findall(r"^warmstate:store_published(?:_total)?\{.*\} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def measure(http: httpx.Client, length: int, rng: random.Random) -> tuple[float, float, float]:
    """Seconds to the first token of a cold prefix, of a local and of a stored one."""
    here, there = rng.sample(ready_replicas(http), 2)
    prefix = rng.choices(range(1000, 200_000), k=length)

    def ask(replica_id: str, expected_cached: int) -> float:
        question = rng.choices(range(1000, 200_000), k=QUESTION_TOKENS)
        return first_token(http, prefix + question, replica_id, expected_cached)

    before = num_published(http)
    cold = ask(here, 0)
    local = ask(here, length)
    wait_until_published(http, before)
    # The other replica hears of it by an event.
    time.sleep(2)
    return cold, local, ask(there, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32_768], metavar="TOKENS")
    parser.add_argument("--layers", type=int, default=24, choices=range(4, 25, 4))
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    # A `timeout` must not leave the server behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rng = random.Random(0)
    print(f"Qwen3.5-0.8B dense shape, bfloat16, {arguments.layers} of 24 layers; medians of {arguments.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "bench"
        write_demo_checkpoint(model, "qwen3_5_text", "0.8b", num_hidden_layers=arguments.layers)
        with running(model, max(arguments.lengths)) as http:
            measure(http, 512, rng)
            for length in arguments.lengths:
                rounds = [measure(http, length, rng) for _ in range(arguments.rounds)]
                cold, local, stored = (statistics.median(column) for column in zip(*rounds, strict=True))
                print(
                    f"{length:6} tokens: cold {cold:8.2f} s, local {local:6.2f} s (1/{cold / local:.0f}), "
                    f"from the store {stored:6.2f} s (1/{cold / stored:.0f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
