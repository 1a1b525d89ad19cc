"""Owns the account of what prompts found in the caches, and of what kept them from more. Knows no engine.

It is told once per request, after the fact. Nothing of it reaches a client: its work is the same whatever another
tenant has cached (CVE-2025-46570), and its figures are for operators.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from warmstate.replicas.cache.blockers import Blocked, Blocker, PathFacts, blocked_here
from warmstate.replicas.cache.divergence import PathEnds
from warmstate.replicas.cache.salt_watch import SaltWatch
from warmstate.replicas.histogram import TOKENS, Histogram
from warmstate.replicas.messages import CacheSource

_LOG = logging.getLogger(__name__)

SILENT_MISSES = 200
"""So many requests in a row without a hit are worth a warning."""

_RESULTS = ("hit_device", "hit_host", "hit_store", "miss", "too_short")

FindElsewhere = Callable[[Sequence[bytes]], int]
"""The deepest position on a path of prefix keys that is known in another namespace. May ask a server."""


@dataclass(frozen=True, slots=True)
class StartedPrompt:
    """A prompt that began to run. `keys` are those of its boundaries up to `facts.limit`."""

    root: bytes
    keys: Sequence[bytes]
    token_ids: npt.NDArray[np.int32]
    source: CacheSource
    facts: PathFacts


class PromptAccount(Protocol):
    """Implementations: `PrefixAnalysis` at once, `analysis_thread.AnalysisThread` on a thread of its own."""

    def put(self, prompt: StartedPrompt) -> None: ...

    def stats(self) -> dict[str, float]: ...


class PrefixAnalysis:
    """Counts each prompt's result, and every token that was not resumed under one `Blocker`."""

    def __init__(self, find_elsewhere: FindElsewhere | None = None) -> None:
        self._find_elsewhere = find_elsewhere or _nowhere
        self._salts = SaltWatch()
        self._ends = PathEnds()
        self._results = Counter(dict.fromkeys(_RESULTS, 0))
        self._tokens = Counter(dict.fromkeys(Blocker, 0))
        self._requests = Counter(dict.fromkeys(Blocker, 0))
        self._lost = Histogram(TOKENS)
        self._left_at = Histogram(TOKENS)
        self._misses_in_row: Counter[Blocker] = Counter()
        self._num_in_row = 0
        self._has_warned = False

    def put(self, prompt: StartedPrompt) -> None:
        self._results[_result(prompt)] += 1
        if prompt.facts.limit == 0:
            return
        blocked = self._blocked(prompt)
        for stretch in blocked:
            self._tokens[stretch.blocker] += stretch.num_tokens
            self._requests[stretch.blocker] += 1
        divergence = self._ends.put(prompt.keys)
        if divergence is not None:
            self._left_at.observe(divergence.position)
            self._lost.observe(divergence.num_lost)
        self._watch_for_silence(prompt, blocked)

    def stats(self) -> dict[str, float]:
        """Requests by result; tokens and requests by what blocked them; where prompts left their predecessors."""
        return {
            **{f"cache_requests_{name}": float(n) for name, n in self._results.items()},
            **{f"cache_blocked_tokens_{name}": float(n) for name, n in self._tokens.items()},
            **{f"cache_blocked_requests_{name}": float(n) for name, n in self._requests.items()},
            **self._lost.as_dict("prompt_divergence_lost_tokens"),
            **self._left_at.as_dict("prompt_divergence_position_tokens"),
        }

    def _blocked(self, prompt: StartedPrompt) -> list[Blocked]:
        """Every stretch that was not resumed. What nobody here knew may be known under another salt or namespace."""
        facts, found = prompt.facts, blocked_here(prompt.facts)
        start = facts.num_cached + sum(stretch.num_tokens for stretch in found)
        num_salted = self._salts.put(prompt.root, prompt.keys, prompt.token_ids)
        num_elsewhere = self._find_elsewhere(prompt.keys) if start < facts.limit else 0
        for end, blocker in (
            (num_salted, Blocker.SALT),
            (num_elsewhere, Blocker.NAMESPACE),
            (facts.limit, Blocker.COLD),
        ):
            end = min(end, facts.limit)
            if end > start:
                found.append(Blocked(blocker, end - start))
                start = end
        return found

    def _watch_for_silence(self, prompt: StartedPrompt, blocked: Sequence[Blocked]) -> None:
        if prompt.facts.num_cached:
            self._num_in_row = 0
            self._misses_in_row.clear()
            return
        self._num_in_row += 1
        for stretch in blocked:
            self._misses_in_row[stretch.blocker] += stretch.num_tokens
        if self._num_in_row >= SILENT_MISSES and not self._has_warned:
            self._has_warned = True
            blocker, num_tokens = self._misses_in_row.most_common(1)[0]
            _LOG.warning(
                "the last %d requests that could have resumed a prefix resumed none; most tokens (%d) were blocked by: "
                "%s; see warmstate:cache_blocked_tokens on /metrics",
                self._num_in_row,
                num_tokens,
                blocker,
            )


def _nowhere(keys: Sequence[bytes]) -> int:
    return 0


def _result(prompt: StartedPrompt) -> str:
    if prompt.facts.num_cached:
        return f"hit_{prompt.source}"
    return "miss" if prompt.facts.limit else "too_short"
