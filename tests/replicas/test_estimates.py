"""Estimates of rates: exact on exact data, careful where data cannot tell, and quick to follow a change."""

import pytest

from warmstate.replicas.cache.estimates import HalfLife, RateEstimate, TransferEstimate, TransferRate

LIFE = HalfLife(samples=4, seconds=10)


def fill(
    estimate: TransferEstimate, latency_s: float, bytes_per_s: float, sizes: list[int], start_s: float = 0
) -> None:
    for index, size in enumerate(sizes):
        others = index % 3
        estimate.put(size, others, latency_s + size * (1 + others) / bytes_per_s, float(index))


def found(estimate: TransferEstimate) -> TransferRate:
    rate = estimate.find()
    assert rate is not None
    return rate


def test_nothing_is_known_before_the_first_sample() -> None:
    assert TransferEstimate(LIFE).find() is None
    assert RateEstimate(LIFE).find() is None


def test_latency_and_bandwidth_are_told_apart_by_sizes_that_differ() -> None:
    estimate = TransferEstimate(LIFE)
    fill(estimate, 0.02, 1e8, [10_000, 20_000_000, 1_000_000, 40_000_000] * 5)
    rate = found(estimate)
    assert rate.bytes_per_s == pytest.approx(1e8, rel=0.1)
    assert rate.seconds(30_000_000, 1) == pytest.approx(0.62, rel=0.1)


def test_one_size_alone_is_predicted_exactly_and_never_cheaper_when_larger() -> None:
    estimate = TransferEstimate(LIFE)
    for at in range(5):
        estimate.put(1_000_000, 0, 0.05, float(at))
    rate = found(estimate)
    assert rate.seconds(1_000_000, 0) == pytest.approx(0.05)
    assert rate.seconds(2_000_000, 0) == pytest.approx(0.10)
    assert rate.latency_s == pytest.approx(0, abs=1e-9)


def test_time_that_does_not_grow_with_bytes_is_latency() -> None:
    estimate = TransferEstimate(LIFE)
    for at in range(40):
        estimate.put(100_000 if at % 2 else 1_000, 0, 0.01, float(at))
    rate = found(estimate)
    assert rate.latency_s > 0.008
    assert rate.seconds(1_000, 0) == pytest.approx(0.01, rel=0.2)


def test_noise_never_gives_a_negative_rate_or_latency() -> None:
    estimate = TransferEstimate(LIFE)
    for at, (size, seconds) in enumerate([(100, 5.0), (1_000_000, 0.001), (50, 9.0), (2_000_000, 0.0)]):
        estimate.put(size, 0, seconds, float(at))
        rate = found(estimate)
        assert rate.latency_s >= 0
        assert rate.bytes_per_s > 0


def test_an_old_slow_store_is_forgotten_with_the_next_sample() -> None:
    estimate = TransferEstimate(LIFE)
    fill(estimate, 0, 1e6, [1_000_000] * 10)
    assert found(estimate).seconds(1_000_000, 0) == pytest.approx(1.0, rel=0.05)
    estimate.put(1_000_000, 0, 0.01, 100.0)
    rate = found(estimate)
    assert rate.seconds(1_000_000, 0) < 0.05
    assert rate.measured_at_s == 100.0


def test_a_store_that_turns_slow_is_noticed_within_two_samples() -> None:
    estimate = TransferEstimate(LIFE)
    fill(estimate, 0, 1e9, [1_000_000] * 10)
    for at in (10.0, 11.0):
        estimate.put(1_000_000, 0, 2.0, at)
    assert found(estimate).seconds(1_000_000, 0) > 0.3


def test_a_rate_weighs_seconds_not_samples() -> None:
    rate = RateEstimate(HalfLife(samples=1e9, seconds=1e9))
    rate.put(1000, 1.0, 0.0)
    rate.put(10, 1.0, 1.0)
    assert rate.find() == pytest.approx(505)


def test_a_rate_follows_what_is_new() -> None:
    rate = RateEstimate(LIFE)
    for at in range(20):
        rate.put(100, 1.0, float(at))
    for at in range(20, 36):
        rate.put(400, 1.0, float(at))
    found_rate = rate.find()
    assert found_rate is not None
    assert 350 < found_rate <= 400
