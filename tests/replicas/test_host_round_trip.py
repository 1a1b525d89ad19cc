"""Reported failures of host tiers for hybrid models: each prefix that comes back from there gives the same answer."""

from collections.abc import Callable
from typing import Any

from warmstate.replicas.config import CacheConfig

Build = Callable[..., Any]

# The fake's checkpoint at 576 tokens: two KV segments of 4 KiB, a state and a tail of one block.
PREFIX_BYTES = 2 * 4096 + 176 + 1024


def cache_of(num_prefixes: int) -> CacheConfig:
    return CacheConfig(host_bytes=num_prefixes * PREFIX_BYTES, parking_fraction=0.0)


def test_a_round_trip_through_the_host_tier_gives_the_same_output_each_time(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    """Sglang 39830, 39862: wrong output 20 of 20; the conv state was not carried with the slot."""
    backend = fake_backend(num_blocks=24)
    engine = engine_over(backend, cache=cache_of(3))
    expected: dict[int, Any] = {}
    for turn in range(20):
        seed = turn % 3
        request = request_for(prompt_of(600, seed=seed), temperature=0.8, seed=1)
        result = run_requests(engine, [request])[request.request_id]
        backend.fill_slots_with_garbage()
        assert result.output == expected.setdefault(seed, result.output)
        assert result.cache_source == ("none" if turn < 3 else "host")
        assert result.num_cached_tokens == (0 if turn < 3 else 576)


def test_a_state_that_was_backed_up_is_matched_again_after_its_blocks_were_reused(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    """Sglang 33713: a state that was backed up was never matched again."""
    engine = engine_over(fake_backend(num_blocks=12), cache=cache_of(2))
    cached = []
    for seed in (0, 1, 0, 1, 0):
        request = request_for(prompt_of(600, seed=seed))
        cached.append(run_requests(engine, [request])[request.request_id].num_cached_tokens)
    assert cached == [0, 0, 576, 576, 576]


def test_resident_kv_whose_state_has_gone_is_not_served_and_not_in_the_way(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    """Sglang 40680: KV stayed resident and unservable after its state was given up."""
    told: list[tuple[int, bool]] = []
    engine = engine_over(
        fake_backend(num_blocks=64),
        cache=cache_of(1),
        listener=lambda key, position, usable: told.append((position, usable)),
    )
    outcomes = []
    for seed in (0, 1, 0, 0):
        request = request_for(prompt_of(600, seed=seed))
        result = run_requests(engine, [request])[request.request_id]
        outcomes.append((result.num_cached_tokens, result.cache_source, result.output))
    assert [outcome[:2] for outcome in outcomes] == [(0, "none"), (0, "none"), (0, "none"), (576, "device")]
    assert outcomes[0][2] == outcomes[2][2] == outcomes[3][2]
    assert told == [(576, True), (576, False), (576, True), (576, False), (576, True)]
    assert engine.stats()["host_evictions_budget"] == 2
    assert engine.stats()["host_evictions_orphan_kv"] == 4


def test_the_figures_of_the_tiers_add_up(
    fake_backend: Build, engine_over: Build, run_requests: Build, request_for: Build, prompt_of: Build
) -> None:
    engine = engine_over(fake_backend(num_slots=2, num_blocks=24), cache=CacheConfig(8 * PREFIX_BYTES))
    run_requests(engine, [request_for(prompt_of(600))])
    stats = engine.stats()
    assert stats["host_bytes"] == PREFIX_BYTES
    assert stats["host_budget_bytes"] + stats["parked_budget_bytes"] == 8 * PREFIX_BYTES
    assert (stats["host_objects"], stats["host_checkpoints"], stats["host_checkpoints_whole"]) == (4, 1, 1)
    assert (stats["device_kv_bytes"], stats["device_kv_resident_bytes"]) == (0, 9 * 1024)
    assert (stats["device_kv_budget_bytes"], stats["device_state_budget_bytes"]) == (23 * 1024, 2 * 176)
