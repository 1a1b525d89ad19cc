"""Owns the choice between fetching a prefix from the store and computing it. Pure; knows no store and no engine."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from warmstate.replicas.cache.estimates import TransferRate

FetchPolicy = Literal["auto", "always", "never"]

MARGIN = 0.10
"""The share of the saved time that a fetch must leave over: estimates err, and a fetch loads the store for others."""

PROBE_AFTER_S = 30.0
"""A measurement older than this is tried anew, so that a store that was slow once is not avoided for ever."""


class FetchReason(StrEnum):
    """Why a prefix is fetched (the first four) or not."""

    PAYS = "pays"
    UNMEASURED = "unmeasured"
    PROBE = "probe"
    ALWAYS = "always"
    NOTHING_STORED = "nothing_stored"
    TOO_LARGE = "too_large"
    COMPUTES_SOONER = "computes_sooner"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FetchCandidate:
    """A prefix of `position` tokens in the store, and the bytes of it that are missing here."""

    position: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FetchInputs:
    """All that the choice depends on. `prefill_tokens_per_s` and `store` are None until measured."""

    num_tokens: int
    local_position: int
    candidates: tuple[FetchCandidate, ...]
    max_bytes: int
    num_in_flight: int
    prefill_tokens_per_s: float | None
    store: TransferRate | None
    may_probe: bool


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """What to fetch, if anything; `fetch_s` and `saved_s` are the estimates that decided, where there were any."""

    reason: FetchReason
    inputs: FetchInputs
    chosen: FetchCandidate | None = None
    fetch_s: float | None = None
    saved_s: float | None = None

    @property
    def num_stored(self) -> int:
        """The deepest position that the store was known to have, beyond what was local."""
        return max((candidate.position for candidate in self.inputs.candidates), default=0)

    def __str__(self) -> str:
        i = self.inputs
        stored = ",".join(f"{c.position}:{c.num_bytes}B" for c in i.candidates) or "none"
        store = f"{i.store.latency_s * 1e3:.2f}ms+{i.store.bytes_per_s:.3g}B/s" if i.store else "unmeasured"
        return (
            f"{f'fetch {self.chosen.position}' if self.chosen else 'no fetch'} ({self.reason}): tokens={i.num_tokens} "
            f"local={i.local_position} stored={stored} in_flight={i.num_in_flight} store={store} "
            f"prefill={_figure(i.prefill_tokens_per_s, 'tokens/s')} fetch_s={_figure(self.fetch_s)} "
            f"saved_s={_figure(self.saved_s)}"
        )


def decide(policy: FetchPolicy, inputs: FetchInputs) -> FetchDecision:
    """The start with the earliest estimated first token: at a stored prefix, or at what is local.

    A fetch pays iff latency + bytes / bandwidth * (1 + in flight) < saved tokens / prefill rate, less the margin. The
    deepest prefix is not always the best: it may need KV that a shallower one has here.
    """
    deeper = [c for c in inputs.candidates if c.position > inputs.local_position]
    if not deeper:
        return FetchDecision(FetchReason.NOTHING_STORED, inputs)
    if policy == "never":
        return FetchDecision(FetchReason.NEVER, inputs)
    fitting = [c for c in deeper if c.num_bytes <= inputs.max_bytes]
    if not fitting:
        return FetchDecision(FetchReason.TOO_LARGE, inputs)
    deepest = max(fitting, key=lambda candidate: candidate.position)
    if policy == "always":
        return FetchDecision(FetchReason.ALWAYS, inputs, deepest)
    if inputs.store is None or inputs.prefill_tokens_per_s is None:
        return FetchDecision(FetchReason.UNMEASURED, inputs, deepest)
    return _decide_measured(inputs, fitting, inputs.store, inputs.prefill_tokens_per_s)


def _decide_measured(
    inputs: FetchInputs, candidates: list[FetchCandidate], store: TransferRate, prefill_tokens_per_s: float
) -> FetchDecision:
    def fetch_s(candidate: FetchCandidate) -> float:
        return store.seconds(candidate.num_bytes, inputs.num_in_flight)

    def saved_s(candidate: FetchCandidate) -> float:
        return (candidate.position - inputs.local_position) / prefill_tokens_per_s

    def gain_s(candidate: FetchCandidate) -> float:
        return (1 - MARGIN) * saved_s(candidate) - fetch_s(candidate)

    best = max(candidates, key=gain_s)
    figures = (fetch_s(best), saved_s(best))
    if gain_s(best) > 0:
        return FetchDecision(FetchReason.PAYS, inputs, best, *figures)
    if inputs.may_probe:
        return FetchDecision(FetchReason.PROBE, inputs, best, *figures)
    return FetchDecision(FetchReason.COMPUTES_SOONER, inputs, None, *figures)


def _figure(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:.3g}{unit}"
