"""A prompt of 256K tokens through a tiny float32 model: memory outside the KV stays flat, and a hit equals the miss.

    python tests/bench/bench_long_prompt.py [--tokens 262000]

Runs one replica in this process. The resident set is sampled every 50 ms; the KV of the prompt (pages of the backend,
and its copy in the host tier) is taken off. Then the same prompt is answered again from the cache.
"""

import argparse
import asyncio
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from warmstate.cache_store.keys import chain_root, prefix_keys
from warmstate.cluster.launch.process_heap import keep_freed_memory
from warmstate.cluster.launch.strict_products import ask_for_strict_products
from warmstate.models.config import read_config
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint
from warmstate.replicas.config import CacheConfig, EngineConfig, ReplicaConfig
from warmstate.replicas.messages import GenerateRequest, SamplingParams, TokenDelta, TokenLogprobs
from warmstate.replicas.service import ReplicaService

MIB = 1 << 20
NEW_TOKENS = 8


class PeakMemory:
    """The largest resident set of this process while the context is open, in bytes."""

    def __enter__(self) -> "PeakMemory":
        self._process = psutil.Process()
        self.start_bytes = self.peak_bytes = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)


async def answer(
    service: ReplicaService, name: str, prompt: np.ndarray
) -> tuple[int, list[int], list[TokenLogprobs], float]:
    """Cached tokens, new tokens, their logprobs and the seconds until the first."""
    root = chain_root()
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=5)
    request = GenerateRequest(name, prompt, sampling, root, b"".join(prefix_keys(prompt.astype(np.uint32), root)))
    started, first_s, cached = time.perf_counter(), 0.0, 0
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    async for reply in service.generate(request):
        if isinstance(reply, TokenDelta):
            assert reply.error is None, reply.error
            first_s = first_s or time.perf_counter() - started
            cached = reply.num_cached_tokens if reply.num_cached_tokens is not None else cached
            tokens += reply.token_ids
            logprobs += reply.logprobs
    return cached, tokens, logprobs, first_s


async def measure(model: Path, num_tokens: int) -> None:
    config = read_config(model)
    kv_token_bytes = config.layer_types.count("full_attention") * config.num_kv_heads * 2 * config.head_dim * 4
    engine = EngineConfig(max_model_len=num_tokens + 1024, kv_tokens=num_tokens + 8192)
    cache = CacheConfig(host_bytes=2 * (num_tokens * kv_token_bytes) + 512 * MIB)
    service = ReplicaService(ReplicaConfig(model, torch.float32, True, 2, engine, cache), "bench")
    await service.start()
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, num_tokens, dtype=np.int32)
    await answer(service, "short", rng.integers(0, 256, 4096, dtype=np.int32))
    with PeakMemory() as memory:
        cold = await answer(service, "cold", prompt)
    warm = await answer(service, "warm", prompt)
    await service.close()
    kv_bytes = num_tokens * kv_token_bytes
    grown = memory.peak_bytes - memory.start_bytes
    print(f"prompt {num_tokens} tokens; KV {kv_bytes / MIB:.0f} MiB in pages, as much again in the host tier")
    print(f"resident set grew by {grown / MIB:.0f} MiB at most: {(grown - 2 * kv_bytes) / MIB:.0f} MiB beside the KV")
    print(f"cold: {cold[0]} cached, first token after {cold[3]:.1f} s ({num_tokens / cold[3]:.0f} tokens/s)")
    print(f"warm: {warm[0]} cached, first token after {warm[3]:.3f} s")
    same = cold[1:3] == warm[1:3]
    print(f"hit equals miss, {NEW_TOKENS} tokens and their logprobs bit for bit: {'yes' if same else 'NO'}")
    if not same or warm[0] != (num_tokens - 1) // 64 * 64:
        raise SystemExit("the warm answer differs, or was not warm")


def main() -> None:
    keep_freed_memory()
    ask_for_strict_products()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=262_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        # One attention layer of two heads: its work is quadratic, and what is asked here is memory.
        write_demo_checkpoint(
            model,
            size="tiny",
            dtype=torch.float32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        asyncio.run(measure(model, arguments.tokens))


if __name__ == "__main__":
    main()
