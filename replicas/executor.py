"""Owns the ranks of one replica: it loads them, and gives the engine one backend over all of them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

from warmstate.models.backend import BLOCK_TOKENS, ModelBackend, StateShapes
from warmstate.models.checkpoints.preflight import CheckpointSummary
from warmstate.models.torch_backend import TorchBackend
from warmstate.replicas.cache.state_codec import state_bytes
from warmstate.replicas.config import ReplicaConfig
from warmstate.replicas.errors import OutOfMemory

_LOG = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) while weights load."""


class Executor(Protocol):
    """The ranks of a replica. Implementations: `InProcessExecutor`, one rank in this process; a Ray group later."""

    @property
    def backend(self) -> ModelBackend:
        """All ranks as one backend in the canonical layout."""
        ...

    def close(self) -> None:
        """Gives up the ranks and their memory."""
        ...


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


def kv_bytes(shapes: StateShapes, num_tokens: int) -> int:
    """Bytes of the attention KV of `num_tokens` tokens."""
    return state_bytes(shapes, num_tokens) - state_bytes(shapes, 0)


def check_memory(config: ReplicaConfig, summary: CheckpointSummary) -> None:
    """Raises `OutOfMemory`, with every figure, when weights, KV blocks, slots and host tier exceed what is free."""
    shapes = summary.config.state_shapes(config.dtype)
    needs = {
        "weights": summary.loaded_bytes(config.dtype.itemsize),
        f"KV of {config.engine.kv_tokens} tokens": kv_bytes(shapes, config.engine.kv_tokens),
        f"{config.engine.max_sequences} slots": config.engine.max_sequences * state_bytes(shapes, 0),
        "host cache": config.cache.host_bytes,
    }
    available = psutil.virtual_memory().available
    listed = ", ".join(f"{name} {num_bytes / 2**30:.2f} GiB" for name, num_bytes in needs.items())
    if sum(needs.values()) > available:
        raise OutOfMemory(
            f"{config.model_path} needs {sum(needs.values()) / 2**30:.2f} GiB ({listed}), and {available / 2**30:.2f} "
            f"GiB are available; lower engine.kv_tokens, engine.max_sequences or cache.host_bytes"
        )
    _LOG.info("memory: %s; %.2f GiB are available", listed, available / 2**30)
