"""Owns one replica as others see it: it starts, answers requests, tells how it is, ends. Knows no HTTP and no Ray."""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator

import numpy as np
import torch

from warmstate.cache_store.errors import CacheStoreError
from warmstate.cache_store.keys import chain_root, namespace_digest
from warmstate.cache_store.replica_rows import ReplicaRow
from warmstate.models.backend import ModelBackend
from warmstate.models.checkpoints.identity import namespace_facts
from warmstate.models.checkpoints.preflight import CheckpointSummary, preflight
from warmstate.models.errors import ModelError
from warmstate.replicas.cache.analysis_thread import AnalysisThread
from warmstate.replicas.cache.copying import CopyThread
from warmstate.replicas.cache.prefix_analysis import PrefixAnalysis
from warmstate.replicas.cache.shared_store import SharedStore, new_epoch, store_endpoints
from warmstate.replicas.cache.state_codec import CheckpointNames
from warmstate.replicas.config import CacheConfig, ReplicaConfig
from warmstate.replicas.engine import Engine
from warmstate.replicas.engine_thread import EngineThread
from warmstate.replicas.errors import NotReady, QueueFull, ReplicaError
from warmstate.replicas.executor import Executor, InProcessExecutor, LoadExecutor
from warmstate.replicas.heartbeat import Heartbeat
from warmstate.replicas.messages import (
    Accepted,
    GenerateRequest,
    Refused,
    ReplicaPhase,
    Reply,
    SamplingParams,
)

_LOG = logging.getLogger(__name__)

# Python's 5 ms would let the engine thread keep the event loop from sending what the last step gave.
SWITCH_INTERVAL_S = 0.0005
_WARM_TOKENS = 130


class ReplicaService:
    """One model copy behind an async generator. `start`, `generate` and `close` belong to one event loop.

    `load` brings up the ranks, blocking.
    """

    def __init__(self, config: ReplicaConfig, replica_id: str, load: LoadExecutor = InProcessExecutor.load) -> None:
        self._config = config
        self._replica_id = replica_id
        self._load_executor = load
        self._epoch = new_epoch()
        self._phase = ReplicaPhase("loading", 0.0)
        self._namespace = b""
        self._executor: Executor | None = None
        self._thread: EngineThread | None = None
        self._shared: SharedStore | None = None
        self._heartbeat: Heartbeat | None = None
        self._account: AnalysisThread | None = None
        self._copies: CopyThread | None = None

    @property
    def phase(self) -> ReplicaPhase:
        return self._phase

    @property
    def namespace(self) -> bytes:
        """The digest of everything that makes two states interchangeable; empty until the checkpoint was checked."""
        return self._namespace

    async def start(self) -> None:
        """Loads and warms up; `phase` tells how far it is.

        Raises `ModelError`, `ReplicaError` (`OutOfMemory`) or `CacheStoreError`, and then stays in phase "failed".
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        endpoints = store_endpoints(self._config.store)
        try:
            if endpoints is not None:
                self._heartbeat = Heartbeat(endpoints.index, self._row)
            await self._load()
        except (ModelError, ReplicaError, CacheStoreError) as error:
            self._phase = ReplicaPhase("failed", self._phase.fraction, str(error))
            if self._heartbeat is not None:
                await self._heartbeat.beat()
            raise
        self._phase = ReplicaPhase("ready", 1.0)
        if self._heartbeat is not None:
            await self._heartbeat.beat()

    async def generate(self, request: GenerateRequest, accept_after_s: float = 0) -> AsyncGenerator[Reply, None]:
        """Yields one `Accepted` and then deltas, or one `Refused`. Closing the generator cancels the request.

        `Accepted` is left out where the first delta comes within `accept_after_s`: it says the same.
        """
        try:
            thread = self._ready_thread()
            stream = thread.submit(request)
        except ReplicaError as error:
            retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else None
            yield Refused(error.status, str(error), retry_after_s)
            return
        try:
            delta = await stream.get_within(accept_after_s)
            if delta is None:
                yield Accepted(self._replica_id)
                delta = await stream.get()
            yield delta
            while delta.finish_reason is None:
                delta = await stream.get()
                yield delta
        finally:
            thread.cancel(request.request_id)

    def stats(self) -> dict[str, float]:
        """Every figure of this replica, by metric name."""
        engine = self._thread.stats if self._thread else {}
        store = self._shared.stats() if self._shared else {}
        return {**engine, **store}

    async def close(self) -> None:
        """Ends running requests with an error and lets go of everything."""
        # First of all: a request accepted from here on might never be answered.
        self._phase = ReplicaPhase("failed", 1.0, "the replica was closed")
        if self._heartbeat is not None:
            await self._heartbeat.close()
        if self._thread is not None:
            await self._thread.close()
        if self._copies is not None:
            await asyncio.to_thread(self._copies.close)
        if self._account is not None:
            await asyncio.to_thread(self._account.close)
        if self._shared is not None:
            await self._shared.close()
        if self._executor is not None:
            self._executor.close()
        self._heartbeat = self._thread = self._shared = self._executor = self._account = self._copies = None

    async def _load(self) -> None:
        config = self._config
        summary = await asyncio.to_thread(preflight, config.model_path)
        is_deterministic = config.deterministic or config.dtype == torch.float32
        facts = await asyncio.to_thread(namespace_facts, config.model_path, config.dtype, is_deterministic)
        self._namespace = namespace_digest(facts)
        executor = await asyncio.to_thread(self._load_ranks, summary)
        self._executor = executor
        self._phase = ReplicaPhase("warming", 1.0)
        await asyncio.to_thread(self._warm_up, executor.backend)
        await self._open(executor.backend, summary.config.eos_token_ids)

    def _load_ranks(self, summary: CheckpointSummary) -> Executor:
        torch.set_num_threads(self._config.num_threads)
        return self._load_executor(self._config, summary, self._progressed)

    def _progressed(self, bytes_done: int, bytes_total: int) -> None:
        self._phase = ReplicaPhase("loading", bytes_done / max(bytes_total, 1))

    def _warm_up(self, backend: ModelBackend) -> None:
        """Runs one prefill and one decode, so that the first request does not pay for what is done once."""
        torch.set_num_threads(self._config.num_threads)
        engine = Engine(backend, self._config.engine, CacheConfig(0, enabled=False), frozenset(), self._namespace)
        prompt = np.zeros(min(_WARM_TOKENS, engine.context_limit - 2), dtype=np.int32)
        engine.add(GenerateRequest("warm-up", prompt, SamplingParams(max_tokens=2), chain_root(), b""))
        while (deltas := engine.step()) is not None:
            for item in deltas:
                if item.delta.error is not None:
                    raise NotReady(f"the first step on this machine failed: {item.delta.error}")

    async def _open(self, backend: ModelBackend, eos_token_ids: frozenset[int]) -> None:
        config, loop = self._config, asyncio.get_running_loop()
        endpoints = store_endpoints(config.store)
        if endpoints is not None and config.cache.enabled:
            names = CheckpointNames(self._namespace, backend.shapes.num_head_groups)
            self._shared = SharedStore(
                endpoints, config.store, names, self._replica_id, self._epoch, loop, config.cache.max_in_flight_bytes
            )
            await self._shared.catch_up()
        self._copies = CopyThread()
        self._account = AnalysisThread(PrefixAnalysis(self._shared.elsewhere.find_deepest if self._shared else None))
        engine = Engine(
            backend,
            config.engine,
            config.cache,
            eos_token_ids,
            self._namespace,
            self._shared.link if self._shared else None,
            self._shared.directory.tell_local if self._shared else lambda key, position, usable: None,
            self._account,
            self._copies,
        )
        self._thread = EngineThread(engine, config.engine.max_queue, config.num_threads, loop, self._engine_died)

    def _ready_thread(self) -> EngineThread:
        if self._thread is None or self._phase.phase != "ready":
            raise NotReady(f"the model is not ready: {self._phase.phase} {self._phase.detail}".rstrip())
        return self._thread

    def _engine_died(self) -> None:
        _LOG.error("replica %s: the engine thread has ended", self._replica_id)
        self._phase = ReplicaPhase("failed", 1.0, "the engine thread has ended")

    def _row(self) -> ReplicaRow:
        phase = self._phase
        return ReplicaRow(
            self._replica_id,
            self._epoch,
            phase.phase,
            phase.fraction,
            phase.detail,
            self._namespace.hex(),
            self.stats(),
        )
