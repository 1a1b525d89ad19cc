"""Owns the ranks of one replica: it loads them, and gives the engine one backend over all of them."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import psutil
import torch

from warmstate.models.backend import BLOCK_TOKENS, ModelBackend
from warmstate.models.checkpoints.loading import Progress
from warmstate.models.checkpoints.preflight import CheckpointSummary
from warmstate.models.state_pool import slot_bytes
from warmstate.models.torch_backend import TorchBackend
from warmstate.replicas.cache.state_codec import state_bytes
from warmstate.replicas.config import ReplicaConfig
from warmstate.replicas.errors import OutOfMemory

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
    """The bytes that one replica takes for good at its start, by what for. Its host tier fills only as it is used."""
    shapes, engine = summary.config.state_shapes(config.dtype), config.engine
    keep_open = config.deterministic or config.dtype == torch.float32
    return {
        "weights": summary.loaded_bytes(config.dtype.itemsize),
        f"KV of {engine.kv_tokens} tokens": state_bytes(shapes, engine.kv_tokens) - state_bytes(shapes, 0),
        f"{engine.max_sequences} slots": engine.max_sequences * slot_bytes(shapes, keep_open),
    }


def listed_needs(needs: Mapping[str, int]) -> str:
    """What `memory_needs` found, for a message."""
    return ", ".join(f"{name} {num_bytes / 2**30:.2f} GiB" for name, num_bytes in needs.items())


def check_memory(config: ReplicaConfig, summary: CheckpointSummary) -> None:
    """Raises `OutOfMemory`, with every figure, when what a replica needs exceeds what is free."""
    needs = memory_needs(config, summary)
    available = psutil.virtual_memory().available
    if sum(needs.values()) > available:
        raise OutOfMemory(
            f"{config.model_path} needs {sum(needs.values()) / 2**30:.2f} GiB ({listed_needs(needs)}), and "
            f"{available / 2**30:.2f} GiB are available; lower engine.kv_tokens or engine.max_sequences"
        )
    _LOG.info("memory: %s; %.2f GiB are available", listed_needs(needs), available / 2**30)
