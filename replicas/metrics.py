"""Owns the counts of one engine, under vLLM's names where those exist. Knows no exporter."""

from collections import Counter

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


class EngineMetrics:
    """Counters since the start; the engine thread writes, and `as_dict` is called there too."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._seconds = 0.0

    def started(self, sequence: Sequence) -> None:
        """A sequence runs for the first time: what it asked of the prefix caches, and got, in tokens."""
        cached = sequence.num_cached_tokens or 0
        from_store = sequence.cache_source == "store"
        self._counts["prefix_cache_queries"] += sequence.num_prompt_tokens
        self._counts["prefix_cache_hits"] += 0 if from_store else cached
        if sequence.was_fetched:
            self._counts["external_prefix_cache_queries"] += sequence.num_prompt_tokens
            self._counts["external_prefix_cache_hits"] += cached if from_store else 0

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        self._counts["engine_steps"] += 1
        self._counts["engine_step_rows"] += num_rows
        self._counts["engine_step_tokens"] += num_tokens
        self._seconds += seconds

    def generated(self, sequence: Sequence) -> None:
        """One token more; the first one stands for the whole prompt."""
        self._counts["generation_tokens"] += 1
        if sequence.num_generated == 1:
            self._counts["prompt_tokens"] += sequence.num_prompt_tokens

    def finished(self, reason: FinishReason) -> None:
        self._counts[f"request_success_{reason}"] += 1

    def as_dict(self) -> dict[str, float]:
        return {**{name: float(count) for name, count in self._counts.items()}, "engine_step_seconds": self._seconds}
