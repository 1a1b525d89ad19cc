"""Compares TorchBackend with transformers, interleaved in one process, on the Qwen3.5-0.8B dense shape in bfloat16.

    python tests/bench/bench_torch_backend.py [--layers 24] [--rounds 3] [--threads 2] [--dtype bfloat16]
        [--only decode]

Prints tokens per second of both and their ratio for prefill 512 and 2048 and decode of 1 and 8 sequences. The heap and
the maths library are set as in a replica, for both.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models import qwen3_5

from warmstate.cluster.launch.process_heap import keep_freed_memory
from warmstate.cluster.launch.strict_products import ask_for_strict_products
from warmstate.models.backend import BLOCK_TOKENS, PlanRow, SlotRestore, StepPlan
from warmstate.models.torch_backend import TorchBackend

CONTEXT = 256
DECODE_STEPS = 8
VOCAB = 248_320
CASES = (("decode", 1, CONTEXT), ("decode", 8, CONTEXT), ("prefill", 1, 512), ("prefill", 1, 2048))


def make_model(num_layers: int, dtype: torch.dtype) -> Any:
    config = qwen3_5.Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    model = qwen3_5.Qwen3_5ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


class Ours:
    """Prefills and decodes through step plans."""

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend

    def prefill(self, tokens: torch.Tensor) -> Callable[[], None]:
        """Returns the decode loop that goes on from `tokens` [B, T]."""
        batch, length = tokens.shape
        blocks = -(-(length + DECODE_STEPS) // BLOCK_TOKENS)
        tables = 1 + np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)

        def step(start: int, ids: torch.Tensor, restores: tuple[SlotRestore, ...] = ()) -> None:
            rows = tuple(PlanRow(i, i, start, ids.shape[1], tables[i], sample=True) for i in range(batch))
            self._backend.forward(StepPlan(0, rows, restores), ids.flatten().numpy().astype(np.int32))

        step(0, tokens, tuple(SlotRestore(i, 0) for i in range(batch)))

        def decode() -> None:
            for i in range(DECODE_STEPS):
                step(length + i, tokens[:, :1])

        return decode


class Transformers:
    """The same through the model's own cache."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def prefill(self, tokens: torch.Tensor) -> Callable[[], None]:
        cache = self._model(tokens, use_cache=True, logits_to_keep=1).past_key_values

        @torch.inference_mode()
        def decode() -> None:
            for _ in range(DECODE_STEPS):
                self._model(tokens[:, :1], use_cache=True, cache=cache)

        return decode


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(runner: Ours | Transformers, case: tuple[str, int, int], tokens: torch.Tensor) -> float:
    """Tokens per second of one run of a case (kind, batch, tokens)."""
    kind, batch, length = case
    prompt = tokens[: batch * length].view(batch, length)
    if kind == "prefill":
        return batch * length / seconds(lambda: runner.prefill(prompt))
    return batch * DECODE_STEPS / seconds(runner.prefill(prompt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only", choices=("decode", "prefill"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    ask_for_strict_products()
    dtype = getattr(torch, arguments.dtype)
    model = make_model(arguments.layers, dtype)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        backend = TorchBackend.load(Path(directory), dtype, False, num_slots=8, num_blocks=64, max_model_len=4096)
    runners = Ours(backend), Transformers(model)
    tokens = torch.randint(0, VOCAB, (2048,), generator=torch.Generator().manual_seed(1))
    for case in CASES:
        if arguments.only not in (None, case[0]):
            continue
        results = np.array([[measure(runner, case, tokens) for runner in runners] for _ in range(arguments.rounds)])
        ours, theirs = np.median(results, axis=0)
        print(
            f"{case[0]:8} batch {case[1]} tokens {case[2]:5}: {ours:8.1f} tok/s, transformers {theirs:8.1f}, "
            f"ratio {np.median(results[:, 0] / results[:, 1]):5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
