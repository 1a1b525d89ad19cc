"""Reductions, scans, searches and shuffles. ISA, the functions of the same names."""

from typing import Any

import numpy as np
import pytest


def _random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_tensor_reduce_takes_the_last_dimensions(bench: Any) -> None:
    values = _random(4, 2, 8)

    def body() -> Any:
        nl, data, total, top = bench.nl, bench.of(values), bench.fresh(4, 2), bench.fresh(4, 1)
        bench.isa.tensor_reduce(total, nl.add, data, 2, negate=True)
        bench.isa.tensor_reduce(top, nl.maximum, data, (1, 2))
        return total, top

    total, top = bench.run(body)
    np.testing.assert_allclose(total, -values.sum(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(top, values.max((1, 2))[:, None])


def test_partition_reduce_adds_partitions(bench: Any) -> None:
    values = _random(16, 8)
    out = bench.after(lambda dst: bench.isa.tensor_partition_reduce(dst, bench.nl.add, bench.of(values)), 1, 8)
    np.testing.assert_allclose(out, values.sum(0, keepdims=True), rtol=1e-5, atol=1e-6)


def test_tensor_scalar_reduce_gives_both_results_and_goes_on(bench: Any) -> None:
    values = _random(4, 8)

    def body() -> Any:
        nl, commands, reduce = bench.nl, bench.isa.reduce_cmd, bench.isa.tensor_scalar_reduce
        data, out, first, second, top = bench.of(values), bench.fresh(4, 8), *(bench.fresh(4, 1) for _ in range(3))
        reduce(out, data, nl.multiply, 2.0, nl.add, first)
        on = {"reduce_cmd": commands.reduce, "reduce_res_negate": True}
        reduce(bench.fresh(4, 8), data, nl.multiply, 1.0, nl.add, second, **on)
        start = {"reduce_cmd": commands.load_reduce, "reduce_init": bench.of(np.full((4, 1), 10.0))}
        reduce(bench.fresh(4, 8), data, nl.add, 0.0, nl.maximum, top, **start)
        return out, first, second, top

    out, first, second, top = bench.run(body)
    total = values.sum(1, keepdims=True)
    np.testing.assert_array_equal(out, 2 * values)
    np.testing.assert_allclose(first, 2 * total, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, -3 * total, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(top, np.maximum(values.max(1, keepdims=True), 10.0))


def test_cumulative_is_a_prefix_sum_in_one_instruction(bench: Any) -> None:
    values = _random(4, 64)

    def body() -> Any:
        nl, run, sums = bench.nl, bench.isa.tensor_scalar_cumulative, [bench.fresh(4, 64) for _ in range(3)]
        data = bench.of(values)
        run(sums[0], data, nl.multiply, nl.add, 1.0)
        run(sums[1], data, nl.multiply, nl.add, 1.0, reduce_cmd=bench.isa.reduce_cmd.reduce)
        run(sums[2], data, nl.add, nl.maximum, 0.0)
        return tuple(sums)

    total, on, top = bench.run(body)
    np.testing.assert_allclose(total, np.cumsum(values, axis=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(on, np.cumsum(values, axis=1) + values.sum(1, keepdims=True), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(top, np.maximum.accumulate(values, axis=1))


@pytest.mark.parametrize("start", [0.5, "column"])
def test_scan_is_a_recurrence(bench: Any, start: Any) -> None:
    decay, values = np.abs(_random(4, 16)), _random(4, 16, seed=1)
    held, expected = np.full(4, 0.5, np.float32), np.empty((4, 16), np.float32)
    for i in range(16):
        held = decay[:, i] * held + values[:, i]
        expected[:, i] = held

    def instruction(dst: Any) -> None:
        first = bench.of(np.full((4, 1), 0.5)) if start == "column" else start
        operators = (bench.nl.multiply, bench.nl.add)
        bench.isa.tensor_tensor_scan(dst, bench.of(decay), bench.of(values), first, *operators)

    np.testing.assert_allclose(bench.after(instruction, 4, 16), expected, rtol=1e-5)


def test_shuffle_moves_partitions_within_quadrants(bench: Any) -> None:
    values = _random(64, 4)

    def body() -> Any:
        dst = bench.tile(64, 4)
        bench.isa.nc_stream_shuffle(dst, bench.of(values), [255, *range(31)])
        return dst

    out = bench.run(body)
    np.testing.assert_array_equal(out[1:32], values[0:31])
    np.testing.assert_array_equal(out[33:64], values[32:63])
    np.testing.assert_array_equal(out[[0, 32]], np.zeros((2, 4)))


def test_batch_norm_statistics_give_mean_and_variance(bench: Any) -> None:
    values = _random(4, 600)

    def instruction(dst: Any) -> None:
        pieces = bench.fresh(4, 12)
        bench.isa.bn_stats(pieces[:, 0:6], bench.of(values[:, :512]))
        bench.isa.bn_stats(pieces[:, 6:12], bench.of(values[:, 512:]))
        bench.isa.bn_aggr(dst, pieces)

    out = bench.after(instruction, 4, 2)
    np.testing.assert_allclose(out, np.stack((values.mean(1), values.var(1)), 1), rtol=1e-5, atol=1e-6)


def test_max8_find_and_replace_agree_on_duplicates(bench: Any) -> None:
    """The example of ISA nc_match_replace8."""

    def body() -> Any:
        isa, data = bench.isa, bench.of([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]])
        top, found = bench.fresh(1, 8), bench.fresh(1, 8, dtype="uint32")
        where, left = bench.fresh(1, 8, dtype="uint32"), bench.fresh(1, 11)
        isa.max8(top, data)
        isa.nc_find_index8(found, data, top)
        isa.nc_match_replace8(left, data, bench.of([[3, 8, 8, 8, 8, 8, 8, 8]]), -1.0, dst_idx=where)
        missing = bench.fresh(1, 8, dtype="uint16")
        isa.nc_find_index8(missing, data, bench.of([[9, 8, 8, 8, 8, 8, 8, 4]]))
        return top, found, where, left, missing

    top, found, where, left, missing = bench.run(body)
    np.testing.assert_array_equal(top, [[8, 8, 8, 8, 8, 8, 8, 4]])
    np.testing.assert_array_equal(found, [[4, 5, 6, 7, 8, 9, 10, 3]])
    np.testing.assert_array_equal(where, [[2, 10, 9, 8, 7, 6, 5, 4]])
    np.testing.assert_array_equal(left, [[1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1]])
    assert missing[0, 0] == 0xFFFF
