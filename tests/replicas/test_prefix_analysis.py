"""The account of hits and of what blocked longer ones: salts, namespaces, divergence, and silence."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from warmstate.cache_store.keys import chain_root, prefix_keys
from warmstate.replicas.cache.analysis_thread import AnalysisThread
from warmstate.replicas.cache.blockers import PathFacts
from warmstate.replicas.cache.divergence import Divergence, PathEnds
from warmstate.replicas.cache.prefix_analysis import SILENT_MISSES, PrefixAnalysis, StartedPrompt
from warmstate.replicas.cache.salt_watch import SaltWatch

PLAIN, ALICE, BOB = chain_root(), chain_root(b"alice"), chain_root(b"bob")


def tokens_of(length: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def keys_of(tokens: Any, root: bytes = PLAIN) -> list[bytes]:
    return prefix_keys(tokens.astype(np.uint32), root)


def started(tokens: Any, root: bytes = PLAIN, source: Any = "none", **facts: Any) -> StartedPrompt:
    limit = (len(tokens) - 1) // 64 * 64
    keys = keys_of(tokens, root)[: limit // 64]
    return StartedPrompt(root, keys, tokens, source, replace(PathFacts(limit, 0), **facts))


def blocked(analysis: PrefixAnalysis) -> dict[str, float]:
    prefix = "cache_blocked_tokens_"
    return {name.removeprefix(prefix): n for name, n in analysis.stats().items() if name.startswith(prefix) and n}


def results(analysis: PrefixAnalysis) -> dict[str, float]:
    prefix = "cache_requests_"
    return {name.removeprefix(prefix): n for name, n in analysis.stats().items() if name.startswith(prefix) and n}


def test_every_prompt_has_one_result() -> None:
    analysis = PrefixAnalysis()
    for source in ("device", "host", "store"):
        analysis.put(started(tokens_of(200), source=source, num_cached=192))
    analysis.put(started(tokens_of(200)))
    analysis.put(started(tokens_of(64)))
    assert results(analysis) == {"hit_device": 1, "hit_host": 1, "hit_store": 1, "miss": 1, "too_short": 1}


def test_what_nobody_knew_is_cold() -> None:
    analysis = PrefixAnalysis()
    analysis.put(started(tokens_of(600), num_cached=64, num_kv=128))
    assert blocked(analysis) == {"recurrent": 64, "cold": 448}


def test_the_same_tokens_under_another_salt_are_told_apart_from_cold_ones() -> None:
    analysis = PrefixAnalysis()
    analysis.put(started(tokens_of(600), ALICE))
    assert blocked(analysis) == {"cold": 576}
    bobs = np.concatenate([tokens_of(300), tokens_of(300, seed=5)])
    analysis.put(started(bobs, BOB))
    assert blocked(analysis) == {"cold": 576 + 320, "salt": 256}
    analysis.put(started(bobs, BOB, num_cached=576, source="host"))
    assert blocked(analysis) == {"cold": 576 + 320, "salt": 256}


def test_a_prompt_without_a_salt_counts_against_salted_ones_and_the_other_way_round() -> None:
    watch = SaltWatch()
    tokens = tokens_of(300)
    assert watch.put(PLAIN, keys_of(tokens), tokens) == 0
    assert watch.put(PLAIN, keys_of(tokens), tokens) == 0
    assert watch.put(ALICE, keys_of(tokens, ALICE), tokens) == 256
    assert watch.put(PLAIN, keys_of(tokens), tokens) == 256


def test_prompts_without_salts_are_not_hashed_again() -> None:
    """Their keys are the unsalted chain: wrong tokens beside them change nothing."""
    watch = SaltWatch()
    tokens = tokens_of(300)
    watch.put(PLAIN, keys_of(tokens), tokens_of(300, seed=9))
    assert watch.put(ALICE, keys_of(tokens, ALICE), tokens) == 256


def test_the_memory_of_salts_is_bounded_and_forgets_the_oldest() -> None:
    watch = SaltWatch(max_blocks=8)
    for seed in range(20):
        watch.put(ALICE, keys_of(tokens_of(256, seed), ALICE), tokens_of(256, seed))
        assert len(watch) <= 8
    assert watch.put(BOB, keys_of(tokens_of(256, 0), BOB), tokens_of(256, 0)) == 0
    assert watch.put(BOB, keys_of(tokens_of(256, 19), BOB), tokens_of(256, 19)) == 256


def test_what_another_namespace_has_is_told_and_asked_only_where_it_matters() -> None:
    asked: list[int] = []

    def find(keys: Sequence[bytes]) -> int:
        asked.append(len(keys))
        return 320

    analysis = PrefixAnalysis(find)
    analysis.put(started(tokens_of(600), num_cached=64))
    assert blocked(analysis) == {"namespace": 256, "cold": 256}
    analysis.put(started(tokens_of(600), num_cached=576, source="host"))
    assert asked == [9]


def test_a_prompt_that_leaves_its_predecessor_tells_where_and_how_much_was_lost() -> None:
    ends = PathEnds()
    first = tokens_of(640)
    assert ends.put(keys_of(first)) is None
    assert ends.put(keys_of(np.concatenate([first, tokens_of(300, seed=3)]))) is None
    changed = first.copy()
    changed[200] += 1
    assert ends.put(keys_of(changed)) == Divergence(192, 896 - 192)
    assert ends.put(keys_of(first)[:4]) is None
    assert ends.put(keys_of(tokens_of(640, seed=8))) is None


def test_divergence_is_compared_with_the_latest_prompt_on_the_path() -> None:
    ends = PathEnds()
    common = tokens_of(128)
    ends.put(keys_of(np.concatenate([common, tokens_of(640, seed=1)])))
    ends.put(keys_of(np.concatenate([common, tokens_of(64, seed=2)])))
    assert ends.put(keys_of(np.concatenate([common, tokens_of(64, seed=3)]))) == Divergence(128, 64)


def test_divergence_reaches_the_figures() -> None:
    analysis = PrefixAnalysis()
    analysis.put(started(tokens_of(700)))
    changed = tokens_of(700)
    changed[70] += 1
    analysis.put(started(changed))
    stats = analysis.stats()
    assert (stats["prompt_divergence_lost_tokens_count"], stats["prompt_divergence_lost_tokens_sum"]) == (1, 576)
    assert (stats["prompt_divergence_position_tokens_count"], stats["prompt_divergence_position_tokens_sum"]) == (1, 64)


def test_silence_is_broken_once_with_the_leading_blocker(caplog: pytest.LogCaptureFixture) -> None:
    """0 hits of 1,131 requests, and no warning: it must not happen here."""
    analysis = PrefixAnalysis()
    with caplog.at_level(logging.WARNING):
        for seed in range(SILENT_MISSES - 1):
            analysis.put(started(tokens_of(200, seed), num_kv=128))
        for _ in range(50):
            analysis.put(started(tokens_of(60)))
        assert not caplog.records
        for seed in range(SILENT_MISSES):
            analysis.put(started(tokens_of(200, seed), num_kv=128))
    (record,) = caplog.records
    assert f"the last {SILENT_MISSES} requests" in record.getMessage()
    assert "blocked by: recurrent" in record.getMessage()


def test_a_hit_now_and_then_is_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    analysis = PrefixAnalysis()
    for index in range(3 * SILENT_MISSES):
        cached = 64 if index % (SILENT_MISSES - 1) == 0 else 0
        analysis.put(started(tokens_of(100, index), num_cached=cached, source="host"))
    assert not caplog.records


def test_the_account_is_kept_on_a_thread_of_its_own_and_closes_clean() -> None:
    analysis = PrefixAnalysis()
    thread = AnalysisThread(analysis)
    for seed in range(50):
        thread.put(started(tokens_of(100, seed)))
    thread.close()
    assert thread.stats()["cache_requests_miss"] == 50
    assert thread.stats()["cache_requests_left_out"] == 0


def test_an_account_that_fails_says_so_and_lets_no_prompts_pile_up(caplog: pytest.LogCaptureFixture) -> None:
    def fail(keys: Sequence[bytes]) -> int:
        raise ZeroDivisionError("a fault")

    thread = AnalysisThread(PrefixAnalysis(fail))
    assert thread.stats()["cache_analysis_thread_alive"] == 1
    thread.put(started(tokens_of(600)))
    deadline = time.monotonic() + 10
    while thread.stats()["cache_analysis_thread_alive"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.exc_info is not None
    for seed in range(3):
        thread.put(started(tokens_of(100, seed)))
    assert thread.stats()["cache_requests_left_out"] == 3
    thread.close()
