"""The rule that weighs a fetch against computing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstate.replicas.cache.estimates import TransferRate
from warmstate.replicas.cache.fetch_rule import MARGIN, FetchCandidate, FetchDecision, FetchInputs, FetchReason, decide


def inputs(*candidates: tuple[int, int], **changes: Any) -> FetchInputs:
    """1,000 tokens/s against 1 MB/s and 10 ms, unless told otherwise."""
    values: dict[str, Any] = {
        "num_tokens": 1000,
        "local_position": 0,
        "max_bytes": 10**9,
        "num_in_flight": 0,
        "prefill_tokens_per_s": 1000.0,
        "store": TransferRate(0.01, 1e6, 0.0),
        "may_probe": False,
        **changes,
    }
    return FetchInputs(candidates=tuple(FetchCandidate(*candidate) for candidate in candidates), **values)


def position(decision: FetchDecision) -> int | None:
    return decision.chosen.position if decision.chosen else None


def test_a_fetch_must_beat_computing_by_the_margin() -> None:
    saved_s = 0.64
    at_par = int(((1 - MARGIN) * saved_s - 0.01) * 1e6)
    assert decide("auto", inputs((640, at_par - 100))).reason is FetchReason.PAYS
    assert decide("auto", inputs((640, at_par + 100))).reason is FetchReason.COMPUTES_SOONER


def test_what_is_local_already_saves_nothing() -> None:
    assert position(decide("auto", inputs((640, 300_000)))) == 640
    decision = decide("auto", inputs((640, 300_000), local_position=576))
    assert (position(decision), decision.reason) == (None, FetchReason.COMPUTES_SOONER)
    assert decide("auto", inputs((576, 1), local_position=576)).reason is FetchReason.NOTHING_STORED


def test_a_shallower_prefix_that_needs_less_wins_over_a_deeper_one() -> None:
    assert position(decide("auto", inputs((512, 100_000), (640, 500_000)))) == 512
    assert position(decide("auto", inputs((512, 100_000), (640, 150_000)))) == 640


def test_fetches_under_way_make_the_next_one_dearer() -> None:
    assert position(decide("auto", inputs((640, 200_000), num_in_flight=0))) == 640
    assert position(decide("auto", inputs((640, 200_000), num_in_flight=2))) is None


@pytest.mark.parametrize("unknown", ["store", "prefill_tokens_per_s"])
def test_without_a_measurement_the_deepest_is_fetched(unknown: str) -> None:
    decision = decide("auto", inputs((512, 1), (640, 10**8), **{unknown: None}))
    assert (position(decision), decision.reason) == (640, FetchReason.UNMEASURED)


def test_an_old_measurement_is_tried_anew_only_where_it_would_decide() -> None:
    slow = {"store": TransferRate(0.01, 1e3, 0.0), "may_probe": True}
    assert decide("auto", inputs((640, 10**6), **slow)).reason is FetchReason.PROBE
    assert decide("auto", inputs((640, 1000), may_probe=True)).reason is FetchReason.PAYS


def test_the_policy_overrides_every_measurement() -> None:
    slow = TransferRate(0.01, 1.0, 0.0)
    assert position(decide("always", inputs((512, 1), (640, 10**6), store=slow))) == 640
    assert decide("never", inputs((640, 1))).reason is FetchReason.NEVER


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_what_is_larger_than_the_bound_is_never_fetched(policy: Any) -> None:
    assert position(decide(policy, inputs((512, 99), (640, 101), max_bytes=100, store=None))) == 512
    assert decide(policy, inputs((640, 101), max_bytes=100)).reason is FetchReason.TOO_LARGE


def test_a_decision_shows_all_that_it_came_from() -> None:
    text = str(decide("auto", inputs((640, 200_000), local_position=64)))
    for part in ("fetch 640", "pays", "tokens=1000", "local=64", "640:200000B", "10.00ms", "1e+06B/s", "1e+03tokens/s"):
        assert part in text


@given(
    st.lists(st.tuples(st.integers(1, 100).map(lambda n: 64 * n), st.integers(1, 10**8)), max_size=6),
    st.integers(0, 100).map(lambda n: 64 * n),
    st.floats(0, 1),
    st.floats(1e3, 1e10),
    st.floats(1, 1e6),
    st.integers(0, 8),
)
def test_no_other_start_is_estimated_to_be_sooner(
    candidates: list[tuple[int, int]], local: int, latency_s: float, bytes_per_s: float, rate: float, in_flight: int
) -> None:
    store = TransferRate(latency_s, bytes_per_s, 0.0)
    given_inputs = inputs(
        *candidates, local_position=local, store=store, prefill_tokens_per_s=rate, num_in_flight=in_flight
    )
    decision = decide("auto", given_inputs)

    def cost(candidate: FetchCandidate | None) -> float:
        if candidate is None:
            return 0.0
        return store.seconds(candidate.num_bytes, in_flight) - (1 - MARGIN) * (candidate.position - local) / rate

    options = [c for c in given_inputs.candidates if c.position > local]
    assert cost(decision.chosen) <= min([0.0, *map(cost, options)])
