"""In bfloat16 what follows an answer is, resumed from the end of it, what it is computed, but for rounding.

The state at the end of an answer was made by decoding, token by token, and that of a miss by prefill: their results
differ as those of decode and prefill do (`tests/models/torch_backend/test_torch_backend.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from warmstate.models.backend import SequenceState
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint
from warmstate.models.torch_backend import TorchBackend
from warmstate.replicas.config import CacheConfig

Build = Callable[..., Any]

MEAN_ERROR = 0.1


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_demo_checkpoint(path, family=request.param, size="tiny", dtype=torch.bfloat16)
    return path


@pytest.fixture
def ask(model: Path, engine_over: Build, run_requests: Build, request_for: Build) -> Build:
    """`ask(engine, prompt, max_tokens)`, and `ask.engine()` over a backend of its own."""

    class Asking:
        def engine(self, **options: Any) -> Any:
            backend = TorchBackend.load(model, torch.bfloat16, False, num_slots=4, num_blocks=64, max_model_len=1024)
            return engine_over(backend, **options)

        def __call__(self, engine: Any, prompt: Any, max_tokens: int) -> Any:
            request = request_for(prompt, max_tokens=max_tokens, logprobs=20)
            return run_requests(engine, [request])[request.request_id]

    return Asking()


def _difference(result: Any, expected: Any) -> float:
    """Mean difference of the log probabilities of the tokens that either reports for its first position."""
    found, wanted = (dict(x.logprobs[0].top) for x in (result, expected))
    common = found.keys() & wanted.keys()
    assert len(common) >= 5
    return float(np.mean([abs(found[token] - wanted[token]) for token in common]))


def test_what_follows_an_answer_is_resumed_from_its_end(
    ask: Any, prompt_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(100)
    warm, cold = ask.engine(), ask.engine(cache=CacheConfig(0, enabled=False))
    answer = ask(warm, prompt, 90)
    following = np.concatenate([prompt, answer.token_ids, prompt_of(9, seed=3)])
    expected, hit = ask(cold, following, 1), ask(warm, following, 1)
    assert (expected.num_cached_tokens, hit.num_cached_tokens) == (0, 128)
    whole = _difference(hit, expected)
    assert whole < MEAN_ERROR

    write_state = TorchBackend.write_state

    def lose_state(backend: TorchBackend, slot: int, state: SequenceState) -> None:
        write_state(backend, slot, replace(state, rec=torch.zeros_like(state.rec)))

    monkeypatch.setattr(TorchBackend, "write_state", lose_state)
    broken = ask(warm, following, 1)
    assert broken.num_cached_tokens is not None
    assert broken.num_cached_tokens > 0
    lost = _difference(broken, expected)
    print(f"log probabilities differ from the miss's by {whole:.3f} in the mean, with a lost state by {lost:.3f}")
    assert lost > MEAN_ERROR
