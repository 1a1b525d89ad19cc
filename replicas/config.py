"""The frozen settings of one replica, resolved and validated by `cluster`; nothing here reads files or environment."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from warmstate.cache_store.redis_client import TlsFiles
from warmstate.cache_store.store_keeper import KeeperLimits
from warmstate.replicas.cache.fetch_rule import FetchPolicy


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine; tokens and counts, never bytes, so that they mean the same on every backend."""

    max_model_len: int
    max_batch_tokens: int = 2048
    max_sequences: int = 16
    max_queue: int = 256
    kv_tokens: int = 65536


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Budgets of the hybrid prefix cache of one replica. `host_bytes` is the whole: parking is a fraction of it.
    `session_ttl_s` is how long the store is asked to hold the end of an answer, which only its own session can use."""

    host_bytes: int = 2 << 30
    enabled: bool = True
    fetch_policy: FetchPolicy = "auto"
    max_in_flight_bytes: int = 512 << 20
    parking_fraction: float = 0.25
    max_checkpoints_per_path: int = 8
    session_ttl_s: int = 1800

    @property
    def parking_bytes(self) -> int:
        """For preempted sequences, which no cached prefix may push out."""
        return int(self.host_bytes * self.parking_fraction)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """How to reach the shared store; url None means that this replica shares nothing.

    `index_url` None: the index lies on the same server as the objects, and has the same password.
    """

    url: str | None = None
    password: str | None = None
    connect_timeout_s: float = 0.25
    operation_timeout_s: float = 2.0
    ttl_s: int = 86_400
    max_object_bytes: int = 256 << 20
    username: str | None = None
    tls: TlsFiles = field(default_factory=TlsFiles)
    min_bytes_per_s: int = 50_000_000
    index_url: str | None = None
    index_password: str | None = None
    keeper: KeeperLimits = field(default_factory=KeeperLimits)


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """All that one replica needs to know."""

    model_path: Path
    dtype: torch.dtype
    deterministic: bool
    num_threads: int
    engine: EngineConfig
    cache: CacheConfig = CacheConfig()
    store: StoreConfig = StoreConfig()
