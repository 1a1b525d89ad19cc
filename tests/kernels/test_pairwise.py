"""The designs that the kernel tests run on have every pair, and no more rows than they need."""

from typing import Any

import pytest

FACTORS: list[dict[str, Any]] = [
    {"length": range(11), "batch": range(4), "ratio": range(3), "dtype": range(2), "lnc": (1, 2)},
    {"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (0, 1), "e": (0, 1)},
    {"a": range(5), "b": range(5)},
    {"a": ((1, 2), (3, 4)), "b": (None, "x"), "c": (True, False)},
]


@pytest.mark.parametrize("factors", FACTORS)
def test_any_two_values_of_two_factors_meet(design: Any, factors: dict[str, Any]) -> None:
    covering, _ = design
    rows = covering(factors)
    for a in factors:
        for b in factors:
            if a != b:
                met = {(row[a], row[b]) for row in rows}
                assert met == {(x, y) for x in factors[a] for y in factors[b]}


@pytest.mark.parametrize("factors", FACTORS)
def test_a_design_is_little_larger_than_its_two_largest_factors(design: Any, factors: dict[str, Any]) -> None:
    covering, _ = design
    largest, second = sorted((len(values) for values in factors.values()), reverse=True)[:2]
    assert len(covering(factors)) <= largest * second + 4


def test_a_missing_pair_is_named(design: Any) -> None:
    covering, uncovered = design
    factors = {"length": (1, 2, 3), "batch": (1, 2)}
    rows = covering(factors)
    assert uncovered(factors, rows) == []
    assert uncovered(factors, rows[1:]) == [("batch", rows[0]["batch"], "length", rows[0]["length"])]
