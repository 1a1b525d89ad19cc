"""Owns the ranks of one replica: it loads them, and gives the engine one backend over all of them."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from warmstate.models.backend import BLOCK_TOKENS, ModelBackend
from warmstate.models.checkpoints.loading import Progress
from warmstate.models.checkpoints.preflight import CheckpointSummary
from warmstate.models.state_pool import slot_bytes
from warmstate.models.torch_backend import TorchBackend
from warmstate.replicas.cache.state_codec import state_bytes
from warmstate.replicas.config import ReplicaConfig
from warmstate.replicas.errors import OutOfMemory
from warmstate.replicas.free_memory import find_memory

_LOG = logging.getLogger(__name__)


class Executor(Protocol):
    """The ranks of a replica. Implementations: `InProcessExecutor`, one rank in this process; a Ray group later."""

    @property
    def backend(self) -> ModelBackend:
        """All ranks as one backend in the canonical layout."""
        ...

    def close(self) -> None:
        """Gives up the ranks and their memory."""
        ...


LoadExecutor = Callable[[ReplicaConfig, CheckpointSummary, Progress], Executor]
"""Brings up the ranks of a replica: `InProcessExecutor.load`, or a double."""


class InProcessExecutor:
    """One rank that holds the whole model in this process."""

    def __init__(self, backend: ModelBackend) -> None:
        self._backend: ModelBackend | None = backend

    @classmethod
    def load(cls, config: ReplicaConfig, summary: CheckpointSummary, progress: Progress) -> "InProcessExecutor":
        """Blocking. Raises `OutOfMemory` before anything is loaded that cannot fit, and `CheckpointError`."""
        check_memory(config, summary)
        engine = config.engine
        backend = TorchBackend.load(
            Path(config.model_path),
            config.dtype,
            config.deterministic,
            num_slots=engine.max_sequences,
            num_blocks=engine.kv_tokens // BLOCK_TOKENS + 1,
            max_model_len=engine.max_model_len,
            progress=progress,
        )
        return cls(backend)

    @property
    def backend(self) -> ModelBackend:
        assert self._backend is not None, "the executor is closed"
        return self._backend

    def close(self) -> None:
        self._backend = None


def memory_needs(config: ReplicaConfig, summary: CheckpointSummary) -> dict[str, int]:
    """The bytes that one replica uses once its KV is full, by what for. Its host tier comes on top as it fills."""
    engine = config.engine
    return {
        "weights": summary.loaded_bytes(config.dtype.itemsize),
        f"KV of {engine.kv_tokens} tokens": _kv_bytes(config, summary, engine.kv_tokens),
        f"{engine.max_sequences} slots": _slots_bytes(config, summary),
    }


def least_needs(config: ReplicaConfig, summary: CheckpointSummary) -> int:
    """The bytes without which a replica cannot answer the longest request: weights, slots, and its KV."""
    kv_bytes = _kv_bytes(config, summary, config.engine.max_model_len)
    return summary.loaded_bytes(config.dtype.itemsize) + _slots_bytes(config, summary) + kv_bytes


def _kv_bytes(config: ReplicaConfig, summary: CheckpointSummary, num_tokens: int) -> int:
    shapes = summary.config.state_shapes(config.dtype)
    return state_bytes(shapes, num_tokens) - state_bytes(shapes, 0)


def _slots_bytes(config: ReplicaConfig, summary: CheckpointSummary) -> int:
    keep_open = config.deterministic or config.dtype == torch.float32
    return config.engine.max_sequences * slot_bytes(summary.config.state_shapes(config.dtype), keep_open)


def listed_needs(needs: Mapping[str, int]) -> str:
    """What `memory_needs` found, for a message."""
    return ", ".join(f"{name} {num_bytes / 2**30:.2f} GiB" for name, num_bytes in needs.items())


def check_memory(config: ReplicaConfig, summary: CheckpointSummary) -> None:
    """Raises `OutOfMemory`, with every figure, when what a replica cannot do without exceeds what is free, or its full
    KV what there is at all."""
    needs, memory = memory_needs(config, summary), find_memory()
    if least_needs(config, summary) > memory.free or sum(needs.values()) > memory.total:
        raise OutOfMemory(
            f"{config.model_path} needs {sum(needs.values()) / 2**30:.2f} GiB ({listed_needs(needs)}), and "
            f"{memory.free / 2**30:.2f} GiB are available; lower engine.kv_tokens or engine.max_sequences"
        )
    _LOG.info("memory: %s; %.2f GiB are available", listed_needs(needs), memory.free / 2**30)
