"""Owns the counts of one engine, under vLLM's names where those exist. Knows no exporter."""

import time
from collections import Counter
from collections.abc import Sequence as Rows

from warmstate.replicas.cache.estimates import HalfLife, RateEstimate
from warmstate.replicas.histogram import SECONDS, Histogram
from warmstate.replicas.messages import FinishReason
from warmstate.replicas.sequence import Sequence

_COUNTERS = (
    *(f"request_success_{reason}" for reason in FinishReason),
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "engine_steps",
    "engine_step_rows",
    "engine_step_tokens",
)

_PREFILL_HALF_LIFE = HalfLife(samples=16, seconds=60)
_MIN_PREFILL_PER_ROW = 16
"""Tokens of prefill for each row of a step that counts as one of prefill: decodes then hardly make it longer."""

_TYPICAL_PREFILL = 128
"""Fewer tokens in a step say little of the rate, for short chunks are padded; they count until there is better."""


class EngineMetrics:
    """Counters since the start; the engine thread writes, and `as_dict` is called there too."""

    def __init__(self, *, has_store: bool = False) -> None:
        self._has_store = has_store
        self.prefill_rate = RateEstimate(_PREFILL_HALF_LIFE)
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._seconds = 0.0
        self._restore_seconds = Histogram(SECONDS)
        self._saw_typical_prefill = False

    def started(self, sequence: Sequence) -> None:
        """A sequence runs for the first time: what it asked of the prefix caches, and got, in tokens.

        As in vLLM, the store is asked only for what lies beyond the local hit (v1/core/sched/scheduler.py, where it
        sets `connector_prefix_cache_queries` and `connector_prefix_cache_hits`).
        """
        cached = sequence.num_cached_tokens or 0
        local = cached
        if sequence.cache_source == "store" and sequence.fetch_decision is not None:
            local = min(sequence.fetch_decision.inputs.local_position, cached)
        self._counts["prefix_cache_queries"] += sequence.num_prompt_tokens
        self._counts["prefix_cache_hits"] += local
        if self._has_store:
            self._counts["external_prefix_cache_queries"] += sequence.num_prompt_tokens - local
            self._counts["external_prefix_cache_hits"] += cached - local

    def stepped(self, row_tokens: Rows[int], seconds: float) -> None:
        """A step computed rows of so many tokens each. Where prefill dominated it says how fast prefill is."""
        self._counts["engine_steps"] += 1
        self._counts["engine_step_rows"] += len(row_tokens)
        self._counts["engine_step_tokens"] += sum(row_tokens)
        self._seconds += seconds
        num_prefilled = sum(tokens for tokens in row_tokens if tokens > 1)
        is_typical = num_prefilled >= _TYPICAL_PREFILL
        if num_prefilled >= _MIN_PREFILL_PER_ROW * len(row_tokens) and (is_typical or not self._saw_typical_prefill):
            self._saw_typical_prefill |= is_typical
            self.prefill_rate.put(num_prefilled, seconds, time.monotonic())

    def restored(self, seconds: float) -> None:
        """A prefix was written into a slot and its blocks."""
        self._restore_seconds.observe(seconds)

    def generated(self, sequence: Sequence) -> None:
        """One token more; the first one stands for the whole prompt."""
        self._counts["generation_tokens"] += 1
        if sequence.num_generated == 1:
            self._counts["prompt_tokens"] += sequence.num_prompt_tokens

    def finished(self, reason: FinishReason) -> None:
        self._counts[f"request_success_{reason}"] += 1

    def as_dict(self) -> dict[str, float]:
        rate = self.prefill_rate.find()
        measured = {} if rate is None else {"prefill_tokens_per_s": rate}
        counts = {name: float(count) for name, count in self._counts.items()}
        restores = self._restore_seconds.as_dict("cache_restore_seconds")
        return {**counts, "engine_step_seconds": self._seconds, **restores, **measured}
