"""From a configuration and the headers of a checkpoint to exact settings. Reads no weights and starts nothing."""

import logging
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from warmstate.cache_store.embedded import find_server_binary
from warmstate.cache_store.errors import EmbeddedServerError
from warmstate.cache_store.redis_client import TlsFiles
from warmstate.cache_store.store_keeper import KeeperLimits
from warmstate.cluster.config import AppConfig
from warmstate.cluster.launch.launch_errors import ConfigError, MemoryShort
from warmstate.cluster.model_card import ModelCard, read_model_card
from warmstate.cluster.text.chat_template import ChatTemplate
from warmstate.cluster.text.tokenizer import Tokenizer
from warmstate.models.backend import BLOCK_TOKENS, blocks_for
from warmstate.models.checkpoints.preflight import CheckpointSummary, preflight
from warmstate.replicas.config import CacheConfig, EngineConfig, ReplicaConfig, StoreConfig
from warmstate.replicas.executor import least_needs, listed_needs, memory_needs
from warmstate.replicas.free_memory import Memory, find_memory

logger = logging.getLogger(__name__)

DEFAULT_KV_TOKENS = 65_536
PROCESS_BYTES = 1_400 << 20
"""All but the replicas; measured as 1,250 MiB (proportional set size, Ray 2.60, an empty store)."""

REPLICA_BYTES = 300 << 20
"""A replica's interpreter with torch and Ray, before any weight; measured as 240 MiB."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything decided before the first process starts."""

    config: AppConfig
    summary: CheckpointSummary
    card: ModelCard
    replica: ReplicaConfig

    @property
    def needed_bytes(self) -> int:
        """Of the whole application on one machine once the KV of its replicas is full, with empty prefix caches."""
        return self._with_processes(sum(memory_needs(self.replica, self.summary).values()))

    @property
    def least_bytes(self) -> int:
        """Without which not every replica could answer its longest request."""
        return self._with_processes(least_needs(self.replica, self.summary))

    @property
    def budget_bytes(self) -> int:
        """With every budget used in full: KV, host tiers, what is on its way to and from the store, the store."""
        store, cache = self.config.store, self.replica.cache
        host = cache.host_bytes if cache.enabled else 0
        moving = 0 if store.kind == "none" else 2 * cache.max_in_flight_bytes
        embedded = int(store.maxmemory) if store.kind == "embedded" else 0
        return self.needed_bytes + self.config.replicas * (host + moving) + embedded

    def _with_processes(self, replica_bytes: int) -> int:
        return PROCESS_BYTES + self.config.replicas * (REPLICA_BYTES + replica_bytes)


def plan_launch(config: AppConfig) -> LaunchPlan:
    """Raises `CheckpointError` when the checkpoint cannot be served and `ConfigError` when the sizes contradict it."""
    path = find_checkpoint(config.model.path)
    summary = preflight(path)
    ChatTemplate.from_directory(path, Tokenizer.from_directory(path))
    if config.store.kind == "embedded":
        _check_server_binary()
    dtype = _dtype(config, summary)
    engine = _engine(config, summary, dtype)
    name = config.model.served_name or _default_name(config.model.path)
    return LaunchPlan(
        config=config,
        summary=summary,
        card=read_model_card(path, name, engine.max_model_len),
        replica=ReplicaConfig(
            model_path=path,
            dtype=dtype,
            deterministic=_deterministic(config, dtype),
            num_threads=config.engine.num_threads or max(1, (os.cpu_count() or 1) // config.replicas),
            engine=engine,
            cache=_cache(config),
            store=_store(config),
        ),
    )


def find_checkpoint(name: str) -> Path:
    """A directory as it is; else the snapshot of a Hugging Face id, downloaded if need be.

    Raises `ConfigError` when it is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or not _HUB_ID.fullmatch(name):
        raise ConfigError(f"model.path {name}: no such directory; expected a checkpoint directory or a Hugging Face id")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_CHECKPOINT_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"model.path {name}: no such directory, and Hugging Face gives: {error}") from error


def _default_name(name: str) -> str:
    """A Hugging Face id names itself; a directory is named by its last part."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


def _check_server_binary() -> None:
    try:
        find_server_binary()
    except EmbeddedServerError as error:
        raise ConfigError(f"{error} with --redis-url (store.kind redis), or do without: store.kind none") from error


def _dtype(config: AppConfig, summary: CheckpointSummary) -> torch.dtype:
    if config.model.dtype == "auto":
        largest = max(summary.bytes_by_dtype, key=lambda name: summary.bytes_by_dtype[name])
        if largest == "F16":
            logger.warning("the weights are float16 and are served as bfloat16; --dtype float32 keeps all their bits")
        return torch.float32 if largest == "F32" else torch.bfloat16
    return torch.float32 if config.model.dtype == "float32" else torch.bfloat16


def _deterministic(config: AppConfig, dtype: torch.dtype) -> bool:
    if config.model.deterministic is None:
        return dtype is torch.float32
    if dtype is torch.float32 and not config.model.deterministic:
        raise ConfigError("model.deterministic: float32 is always deterministic; leave it out or use bfloat16")
    return config.model.deterministic


def _tokens_in(kv_bytes: int, summary: CheckpointSummary, dtype: torch.dtype) -> int:
    """How many tokens' KV, in whole blocks, takes so many bytes; raises `ConfigError` where that is not one block."""
    block_bytes = dtype.itemsize * math.prod(summary.config.state_shapes(dtype).kv_shape(BLOCK_TOKENS))
    if kv_bytes < block_bytes:
        raise ConfigError(f"engine.kv_bytes {kv_bytes} cannot hold one block of {BLOCK_TOKENS} tokens: {block_bytes}")
    return kv_bytes // block_bytes * BLOCK_TOKENS


def _engine(config: AppConfig, summary: CheckpointSummary, dtype: torch.dtype) -> EngineConfig:
    engine, longest = config.engine, summary.config.max_position_embeddings
    if engine.max_model_len is not None and engine.max_model_len > longest:
        raise ConfigError(f"engine.max_model_len {engine.max_model_len} is more than the model's {longest} positions")
    wanted = engine.kv_tokens if engine.kv_bytes is None else _tokens_in(int(engine.kv_bytes), summary, dtype)
    max_model_len = engine.max_model_len or min(longest, wanted or DEFAULT_KV_TOKENS)
    kv_tokens = wanted or max(DEFAULT_KV_TOKENS, max_model_len)
    if kv_tokens < max_model_len:
        raise ConfigError(
            f"engine.kv_tokens {kv_tokens} cannot hold one sequence of engine.max_model_len {max_model_len}; "
            "raise the first or lower the second"
        )
    return EngineConfig(
        max_model_len=max_model_len,
        max_batch_tokens=engine.max_batch_tokens,
        max_sequences=engine.max_sequences,
        max_queue=engine.max_queue,
        kv_tokens=blocks_for(kv_tokens) * BLOCK_TOKENS,
    )


def _cache(config: AppConfig) -> CacheConfig:
    cache = config.cache
    return CacheConfig(
        host_bytes=int(cache.host_bytes),
        enabled=cache.enabled,
        fetch_policy=cache.fetch_policy,
        max_in_flight_bytes=int(cache.max_in_flight_bytes),
        parking_fraction=cache.parking_fraction,
        max_checkpoints_per_path=cache.max_checkpoints_per_path,
        session_ttl_s=cache.session_ttl_s,
    )


def _store(config: AppConfig) -> StoreConfig:
    """The embedded store's url and password are not known before it runs; see `store_deployment`."""
    store = config.store
    return StoreConfig(
        url=store.url,
        password=config.redis_password() if store.kind == "redis" else None,
        connect_timeout_s=store.connect_timeout_s,
        operation_timeout_s=store.operation_timeout_s,
        ttl_s=store.ttl_s,
        max_object_bytes=int(store.max_object_bytes),
        username=store.username,
        tls=TlsFiles(store.tls_ca_file, store.tls_cert_file, store.tls_key_file),
        min_bytes_per_s=int(store.min_bandwidth),
        index_url=store.index_url,
        index_password=config.redis_index_password() if store.index_url is not None else None,
        keeper=KeeperLimits(
            int(store.budget_bytes) if store.budget_bytes is not None else None,
            store.high_water,
            store.low_water,
            float(store.ttl_s),
        ),
    )


def check_memory(plan: LaunchPlan, memory: Memory | None = None) -> None:
    """Raises `MemoryShort` with the numbers when the application cannot fit what this machine, or the cgroup, has
    free. Budgets that would outgrow it only later are a warning."""
    memory = memory or find_memory()
    count = plan.config.replicas
    if plan.least_bytes > memory.free or plan.needed_bytes > memory.total:
        raise MemoryShort(
            f"{count} replicas need about {_gib(plan.needed_bytes)}, {_gib(memory.free)} is free: each "
            f"{listed_needs(memory_needs(plan.replica, plan.summary))}, besides "
            f"{_gib(PROCESS_BYTES + count * REPLICA_BYTES)} for Ray and the processes; "
            "use fewer --replicas, a smaller --max-model-len with engine.kv_tokens, or --dtype bfloat16"
        )
    exceeds = plan.budget_bytes > memory.free
    logger.log(
        logging.WARNING if exceeds else logging.INFO,
        "memory: %s at full budgets, %s of it once the KV is full, the rest as cache.host_bytes and the store fill; "
        "%s is free%s",
        _gib(plan.budget_bytes),
        _gib(plan.needed_bytes),
        _gib(memory.free),
        ": lower cache.host_bytes, store.maxmemory or engine.kv_tokens" if exceeds else "",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
