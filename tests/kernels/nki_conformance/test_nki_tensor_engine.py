"""Products and transposes. ISA nc_matmul, nc_transpose."""

from typing import Any

import numpy as np
import pytest


def _random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_matmul_contracts_partitions_and_accumulates_in_float32(bench: Any) -> None:
    left, right = _random(128, 64), _random(128, 96, seed=1)

    def body() -> Any:
        tiles, sums = (bench.of(left), bench.of(right)), []
        for asked in ((None,), (None, None), (None, True), (None, None, False)):
            sums.append(bench.fresh(64, 96, buffer="psum"))
            for accumulate in asked:
                bench.isa.nc_matmul(sums[-1], *tiles, accumulate=accumulate)
        return tuple(sums)

    once, twice, added, again = bench.run(body)
    np.testing.assert_allclose(once, left.T @ right, atol=1e-4)
    np.testing.assert_allclose(twice, 2 * left.T @ right, atol=2e-4)
    np.testing.assert_array_equal(added, twice)
    np.testing.assert_array_equal(again, once)


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 9, 40])
def test_the_neighbours_of_a_column_change_no_bit_of_it(bench: Any, columns: int) -> None:
    """The array sums each column down its own path, however many stream past."""
    left, right = _random(128, 64), _random(128, 40, seed=1)

    def body() -> Any:
        sides = ((left, right), (left, right[:, :columns]), (left[:, :columns], right))
        products = tuple(bench.fresh(a.shape[1], b.shape[1], buffer="psum") for a, b in sides)
        for product, (a, b) in zip(products, sides, strict=True):
            bench.isa.nc_matmul(product, bench.of(a), bench.of(b))
        return products

    whole, part, narrow = bench.run(body)
    np.testing.assert_array_equal(part, whole[:, :columns])
    np.testing.assert_array_equal(narrow, whole[:columns])


def test_matmul_of_double_rows_contracts_both_halves(bench: Any) -> None:
    left, right = np.ones((16, 2, 4)), np.full((16, 2, 8), 2.0)

    def instruction(dst: Any) -> None:
        mode = bench.isa.matmul_perf_mode.double_row
        bench.isa.nc_matmul(dst, bench.of(left, "float8_e4m3"), bench.of(right, "float8_e5m2"), perf_mode=mode)

    np.testing.assert_array_equal(bench.after(instruction, 4, 8, buffer="psum"), np.full((4, 8), 64.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_transpose_moves_bits(bench: Any, dtype: str) -> None:
    values = np.arange(20).reshape(4, 5)

    def body() -> Any:
        isa, source = bench.isa, bench.of(values, dtype)
        large, small = bench.fresh(5, 4, dtype=dtype, buffer="psum"), bench.fresh(5, 4, dtype=dtype)
        isa.nc_transpose(large, source)
        isa.nc_transpose(small, source, engine=isa.engine.vector)
        if dtype == "int32":
            return large, small
        product = bench.fresh(5, 4, dtype=dtype, buffer="psum")
        isa.nc_matmul(product, source, bench.of(np.eye(4), dtype), is_transpose=True)
        return large, small, product

    for turned in bench.run(body):
        np.testing.assert_array_equal(turned, values.T)


def test_a_transpose_keeps_nan_where_it_is(bench: Any) -> None:
    values = _random(8, 8)
    values[2, 3] = np.nan
    out = bench.after(lambda dst: bench.isa.nc_transpose(dst, bench.of(values)), 8, 8, buffer="psum")
    np.testing.assert_array_equal(out, values.T)
