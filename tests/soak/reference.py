"""Owns the answers to compare with: one replica in this process that has all the room it needs, and no cache."""

import threading
from pathlib import Path

import numpy as np
import torch

from warmstate.cache_store.keys import chain_root
from warmstate.models.checkpoints.preflight import preflight
from warmstate.replicas.config import CacheConfig, EngineConfig, ReplicaConfig
from warmstate.replicas.engine import Engine
from warmstate.replicas.executor import InProcessExecutor
from warmstate.replicas.messages import GenerateRequest, SamplingParams


class Reference:
    """Answers one request at a time; thread-safe."""

    def __init__(self, model: Path, max_model_len: int, temperature: float) -> None:
        engine = EngineConfig(max_model_len=max_model_len, max_sequences=1, kv_tokens=max_model_len)
        config = ReplicaConfig(model, torch.float32, True, 1, engine, CacheConfig(0, enabled=False))
        backend = InProcessExecutor.load(config, preflight(model), lambda done, total: None).backend
        self._engine = Engine(backend, engine, config.cache, frozenset(), bytes(32))
        self._temperature = temperature
        self._lock = threading.Lock()

    def answer(self, prompt: list[int], max_tokens: int, seed: int) -> list[int]:
        """The tokens of a seeded answer that no end of text stops."""
        sampling = SamplingParams(max_tokens, temperature=self._temperature, seed=seed, ignore_eos=True)
        request = GenerateRequest("only", np.asarray(prompt, dtype=np.int32), sampling, chain_root(), b"")
        tokens: list[int] = []
        with self._lock:
            self._engine.add(request)
            while (deltas := self._engine.step()) is not None:
                tokens += [token for item in deltas for token in item.delta.token_ids]
        return tokens
