"""Owns the step: schedule, restore, forward, sample, checkpoint, emit. Knows no event loop, no HTTP and no Ray.

One thread calls everything here but `post` and `check`, which any thread may call.
"""

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from warmstate.models.backend import BLOCK_TOKENS, ModelBackend, PlanRow, SlotRestore, StepOutput, StepPlan
from warmstate.models.errors import ModelError
from warmstate.replicas import sequence as sequences
from warmstate.replicas.cache.copying import Copier
from warmstate.replicas.cache.device_tier import device_stats
from warmstate.replicas.cache.fetcher import Fetcher
from warmstate.replicas.cache.host_tier import CheckpointListener, HostTier
from warmstate.replicas.cache.hybrid_cache import HybridCache
from warmstate.replicas.cache.parking import ParkingArea
from warmstate.replicas.cache.prefix_analysis import PromptAccount
from warmstate.replicas.cache.state_codec import CheckpointNames
from warmstate.replicas.cache.store_link import StoreLink
from warmstate.replicas.config import CacheConfig, EngineConfig
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.messages import FinishReason, GenerateRequest, TokenDelta
from warmstate.replicas.metrics import EngineMetrics
from warmstate.replicas.request_checks import check_request
from warmstate.replicas.restore import restore_prefix
from warmstate.replicas.sampler import SampledToken, SamplerRow, finite_rows, sample
from warmstate.replicas.scheduler import Admission, ScheduledRow, Scheduler
from warmstate.replicas.slots import SlotPool

_NOT_FINITE = "the model gave a NaN or infinite state for this request"


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """What one step added to one request."""

    request_id: str
    delta: TokenDelta


@dataclass(slots=True)
class _Outcome:
    """What became of a step's rows, by row index: the token it sampled, or why its sequence must end."""

    tokens: dict[int, SampledToken] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


class Engine:
    """Continuous batching over one `ModelBackend`, with a hybrid prefix cache."""

    def __init__(
        self,
        backend: ModelBackend,
        config: EngineConfig,
        cache: CacheConfig,
        eos_token_ids: frozenset[int],
        namespace: bytes,
        link: StoreLink | None = None,
        listener: CheckpointListener = lambda key, position, usable: None,
        account: PromptAccount | None = None,
        copier: Copier | None = None,
    ) -> None:
        limits = backend.limits
        self._backend = backend
        self._eos_token_ids = eos_token_ids
        self._blocks = BlockPool(limits.num_blocks)
        self._slots = SlotPool(min(limits.num_slots, config.max_sequences))
        self.context_limit = min(config.max_model_len, limits.max_model_len, self._blocks.capacity * BLOCK_TOKENS)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        names = CheckpointNames(namespace, backend.shapes.num_head_groups)
        self._metrics = EngineMetrics(has_store=link is not None)
        host = HostTier(backend.shapes, names, cache.host_bytes - cache.parking_bytes, listener)
        parking = ParkingArea(backend, cache.parking_bytes)
        fetcher = Fetcher(link, backend, self._blocks, host, self._metrics.prefill_rate, cache) if link else None
        self._cache = HybridCache(
            backend, self._blocks, host, parking, names, self.post, cache, link, fetcher, account, copier
        )
        self._scheduler = Scheduler(config.max_batch_tokens, self._blocks, self._slots, self._cache)
        self._sequences: dict[str, sequences.Sequence] = {}
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Requests not running, those still in the inbox included."""
        return len(self._scheduler.waiting) + self._inbox.qsize()

    def check(self, request: GenerateRequest) -> None:
        """Raises `InvalidRequest` or `PromptTooLong` for a prompt that cannot be served."""
        check_request(request, self.context_limit, self._backend.limits.vocab_size)

    def post(self, work: Callable[[], None]) -> None:
        """Hands work to the engine's thread; from any thread."""
        self._inbox.put(work)

    def run_posted(self) -> None:
        """Does what was posted."""
        while not self._inbox.empty():
            self._inbox.get()()

    def wait_for_work(self, timeout_s: float | None = None) -> bool:
        """Sleeps until something was posted, and does it; False when nothing was within `timeout_s`."""
        try:
            self._inbox.get(timeout=timeout_s)()
        except queue.Empty:
            return False
        self.run_posted()
        return True

    def add(self, request: GenerateRequest) -> None:
        """Queues a request that passed `check`."""
        assert request.request_id not in self._sequences, f"request id {request.request_id} is in use"
        sequence = sequences.Sequence(request, next(self._arrivals), self.context_limit)
        self._sequences[request.request_id] = sequence
        self._cache.meet(sequence)
        self._scheduler.put(sequence)

    def cancel(self, request_id: str) -> None:
        """Ends a request wherever it stands and frees all it holds; one that has ended already is no error.

        What is cancelled while it runs has an answer that somebody may go on from: the ingress found a stop string in
        it, or a user has read enough.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        if sequence.slot is not None and not self._cache.keep_output(sequence):
            self._forget_blocks(sequence)
        self._finish(sequence, FinishReason.ABORT)

    def step(self) -> list[SequenceDelta] | None:
        """One step of everything that can run; None when nothing can until work is posted."""
        self.run_posted()
        started = time.perf_counter()
        schedule = self._scheduler.schedule()
        if not schedule.rows:
            return None
        try:
            restores = self._restore(schedule.admissions)
            output = self._forward(schedule.rows, restores)
        except (ModelError, RuntimeError) as error:
            reason = f"the engine failed: {type(error).__name__}: {error}"
            return self._emit(schedule.rows, _Outcome(failures=dict.fromkeys(range(len(schedule.rows)), reason)))
        outcome = self._sample(schedule.rows, output.logits)
        self._checkpoint(schedule.rows, output, outcome)
        deltas = self._emit(schedule.rows, outcome)
        self._metrics.stepped([row.count for row in schedule.rows], time.perf_counter() - started)
        return deltas

    def stats(self) -> dict[str, float]:
        """Everything countable, by metric name."""
        gauges = {
            "num_requests_running": len(self._scheduler.running),
            "num_requests_waiting": self.num_waiting,
            "kv_cache_usage_perc": 1 - self._blocks.num_free / self._blocks.capacity,
            "kv_blocks_resident": self._blocks.num_resident,
            "num_preemptions": self._scheduler.num_preemptions,
        }
        device = device_stats(self._backend.shapes, self._blocks, self._slots)
        return {**self._metrics.as_dict(), **self._cache.stats(), **device, **{k: float(v) for k, v in gauges.items()}}

    def check_integrity(self) -> None:
        """Raises AssertionError where the books contradict each other, or an idle engine holds anything."""
        self._blocks.check_integrity()
        if not self._sequences:
            assert not self._scheduler.running, "sequences run without a request"
            assert not self._scheduler.waiting, "sequences wait without a request"
            assert self._blocks.num_free == self._blocks.capacity, "blocks are held by nobody"
            assert self._slots.num_free == self._slots.num_slots, "slots are held by nobody"
            assert self._cache.is_idle, "promises or parked states are left"

    def _restore(self, admissions: Sequence[Admission]) -> tuple[SlotRestore, ...]:
        for admission in admissions:
            sequence, prefix = admission.sequence, admission.prefix
            if not sequence.has_started:
                sequence.has_started = True
                self._metrics.started(sequence)
                self._cache.started(sequence)
            if prefix is None:
                self._backend.reset_slot(admission.slot)
                continue
            began = time.perf_counter()
            restore_prefix(self._backend, sequence, admission.slot, prefix)
            self._metrics.restored(time.perf_counter() - began)
        return tuple(SlotRestore(a.slot, a.prefix.position if a.prefix else 0) for a in admissions)

    def _forward(self, rows: Sequence[ScheduledRow], restores: tuple[SlotRestore, ...]) -> StepOutput:
        tokens = np.concatenate([row.sequence.get_tokens(row.start, row.start + row.count) for row in rows])
        plan_rows = tuple(_plan_row(row) for row in rows)
        plan = StepPlan(next(self._step_ids), plan_rows, restores, self._slots.take_freed())
        return self._backend.forward(plan, tokens)

    def _sample(self, rows: Sequence[ScheduledRow], logits: torch.Tensor) -> _Outcome:
        outcome = _Outcome()
        sampling = [index for index, row in enumerate(rows) if row.sample]
        finite = finite_rows(logits)
        for index, is_finite in zip(sampling, finite, strict=True):
            if not is_finite:
                outcome.failures[index] = "the model gave NaN or infinite logits for this request"
        kept = [i for i, is_finite in enumerate(finite) if is_finite]
        if kept:
            usable = logits if len(kept) == len(finite) else logits[kept]
            tokens = sample(usable, [self._sampler_row(rows[sampling[i]].sequence) for i in kept])
            outcome.tokens = {sampling[i]: token for i, token in zip(kept, tokens, strict=True)}
        return outcome

    def _sampler_row(self, sequence: sequences.Sequence) -> SamplerRow:
        return SamplerRow(
            sequence.request.sampling,
            sequence.seed,
            sequence.num_output_tokens,
            sequence.original_token_ids,
            sequence.output_token_ids,
            self._stop_ids(sequence),
        )

    def _checkpoint(self, rows: Sequence[ScheduledRow], output: StepOutput, outcome: _Outcome) -> None:
        """Commits the step: only now can its blocks be found by others, and its checkpoints be published."""
        for index, row in enumerate(rows):
            sequence = row.sequence
            sequence.num_computed = row.start + row.count
            states = [output.states_at[index, position] for position in _positions(row)]
            if index in outcome.failures:
                continue
            if sequence.is_broken or not all(self._cache.keep(sequence, state) for state in states):
                outcome.failures[index] = _NOT_FINITE
                continue
            while (key := sequence.find_next_block_key()) is not None:
                self._blocks.put_key(sequence.block_table[sequence.num_keyed_blocks], key)
                sequence.num_keyed_blocks += 1

    def _emit(self, rows: Sequence[ScheduledRow], outcome: _Outcome) -> list[SequenceDelta]:
        deltas: list[SequenceDelta] = []
        for index, row in enumerate(rows):
            if index in outcome.failures:
                delta = self._fail(row.sequence, outcome.failures[index])
            elif index in outcome.tokens:
                delta = self._extend(row.sequence, outcome.tokens[index])
            else:
                continue
            deltas.append(SequenceDelta(row.sequence.request_id, delta))
        return deltas

    def _fail(self, sequence: sequences.Sequence, reason: str) -> TokenDelta:
        """Ends a sequence whose results cannot be trusted."""
        self._forget_blocks(sequence)
        self._finish(sequence, FinishReason.ERROR)
        return TokenDelta((), finish_reason=FinishReason.ERROR, num_cached_tokens=0, error=reason)

    def _forget_blocks(self, sequence: sequences.Sequence) -> None:
        """Nobody else may find what this sequence computed."""
        for block in sequence.block_table[sequence.num_shared_blocks :]:
            self._blocks.forget(block)

    def _extend(self, sequence: sequences.Sequence, token: SampledToken) -> TokenDelta:
        sequence.put_token(token.token_id)
        self._metrics.generated(sequence)
        is_first = sequence.num_generated == 1
        reason = self._finish_reason(sequence, token.token_id)
        if reason is not None:
            if not self._cache.keep_output(sequence):
                return self._fail(sequence, _NOT_FINITE)
            self._finish(sequence, reason)
        return TokenDelta(
            (token.token_id,),
            (token.logprobs,) if token.logprobs else (),
            reason,
            sequence.num_cached_tokens if is_first else None,
            sequence.cache_source if is_first else "none",
        )

    def _finish_reason(self, sequence: sequences.Sequence, token_id: int) -> FinishReason | None:
        if token_id in self._stop_ids(sequence):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.is_full else None

    def _stop_ids(self, sequence: sequences.Sequence) -> frozenset[int]:
        sampling = sequence.request.sampling
        return sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | self._eos_token_ids

    def _finish(self, sequence: sequences.Sequence, reason: FinishReason) -> None:
        del self._sequences[sequence.request_id]
        self._scheduler.remove(sequence)
        self._cache.forget(sequence)
        sequence.finish_reason = reason
        self._metrics.finished(reason)


def _positions(row: ScheduledRow) -> tuple[int, ...]:
    return row.sequence.positions_to_hand_out(row.start, row.start + row.count)


def _plan_row(row: ScheduledRow) -> PlanRow:
    sequence = row.sequence
    assert sequence.slot is not None, "a scheduled sequence has a slot"
    table = np.array(sequence.block_table, dtype=np.int32)
    return PlanRow(sequence.arrival, sequence.slot, row.start, row.count, table, row.sample, _positions(row))
