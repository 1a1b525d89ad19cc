"""What each instruction computes, from its documentation; one test or more per instruction."""

from typing import Any

import numpy as np
import pytest

from warmstate.kernels.nki_sim.errors import OutOfRange, UnwrittenRead
from warmstate.kernels.nki_sim.operators import OPERATORS as OPS

ADD, MULTIPLY, SUBTRACT, MAXIMUM = OPS["add"], OPS["multiply"], OPS["subtract"], OPS["maximum"]


def _random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_fresh_memory_cannot_be_read(bench: Any) -> None:
    with pytest.raises(UnwrittenRead):
        bench.isa.tensor_copy(bench.tile(4, 4), bench.fresh(4, 4))
    half = bench.fresh(4, 4)
    bench.isa.memset(half[:, 0:2], 1.0)
    bench.isa.tensor_copy(bench.tile(4, 2), half[:, 0:2])
    with pytest.raises(UnwrittenRead):
        bench.isa.tensor_copy(bench.tile(4, 2), half[:, 1:3])


@pytest.mark.parametrize(
    "key", [(slice(0, 5),), (slice(0, 4), slice(2, 9)), (4,), (slice(2, 2),), (0, 0, 0), (slice(3, 1),)]
)
def test_an_index_out_of_range_is_an_error(bench: Any, key: Any) -> None:
    with pytest.raises(OutOfRange):
        bench.tile(4, 8)[key]


def test_a_pattern_out_of_range_is_an_error(bench: Any) -> None:
    with pytest.raises(OutOfRange):
        bench.tile(4, 8).ap([[8, 4], [1, 9]])


def test_an_integer_index_keeps_the_partition_and_drops_dimensions_of_hbm(bench: Any) -> None:
    assert bench.tile(4, 8)[2].shape == (1, 8)
    assert bench.tile(4, 8)[:, 3].shape == (4, 1)
    assert bench.hbm(4, 8, 2)[1].shape == (8, 2)
    assert bench.hbm(4)[1].shape == (1,)
    assert bench.tile(4, 8)[bench.nl.ds(1, 2), -2:].shape == (2, 2)


def test_views_share_their_bytes(bench: Any) -> None:
    values = _random(4, 24)
    tile = bench.of(values)
    np.testing.assert_array_equal(
        tile.reshape((4, 2, 12)).permute((0, 2, 1)).read(), values.reshape(4, 2, 12).transpose(0, 2, 1)
    )
    np.testing.assert_array_equal(tile.reshape_dim(1, (2, -1)).flatten_dims(1, 2).read(), values)
    np.testing.assert_array_equal(tile[:, 1:9:3].read(), values[:, 1:9:3])
    np.testing.assert_array_equal(tile.slice(1, 4, 8).read(), values[:, 4:8])
    np.testing.assert_array_equal(tile[:, 0:1].broadcast(1, 5).read(), np.repeat(values[:, :1], 5, axis=1))
    np.testing.assert_array_equal(tile.expand_dim(1).squeeze_dim(1).select(1, 3).read(), values[:, 3])
    np.testing.assert_array_equal(tile.view("int32").read(), values.view(np.int32))
    np.testing.assert_array_equal(
        tile.ap([[24, 4], [0, 2], [2, 12]]).read(), np.repeat(values[:, None, ::2], 2, axis=1)
    )
    assert tile.get_pattern() == [[24, 4], [1, 24]]


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        ("bfloat16", 1.00390625, 1.0),
        ("bfloat16", 1.01171875, 1.015625),
        ("float16", 70000.0, np.inf),
        ("float8_e4m3", 3.3, 3.25),
        ("float8_e4m3", 300.0, np.inf),
        ("float8_e4m3fn", 300.0, 288.0),
        ("float8_e5m2", 1.2, 1.25),
        ("tfloat32", 1.0 + 2.0**-12, 1.0),
        ("int8", 3.0, 3.0),
        ("uint8", 300.0, 255.0),
    ],
)
def test_a_write_rounds_to_the_dtype(bench: Any, dtype: str, value: float, stored: float) -> None:
    read = bench.after(lambda dst: bench.isa.tensor_copy(dst, bench.of([[value]])), 1, 1, dtype=dtype)
    assert read.item() == stored


def test_matmul_contracts_partitions_and_accumulates_in_float32(bench: Any) -> None:
    left, right = _random(128, 64), _random(128, 96, seed=1)
    out = bench.fresh(64, 96, buffer="psum")
    bench.isa.nc_matmul(out, bench.of(left), bench.of(right))
    np.testing.assert_allclose(out.read(), left.T @ right, atol=1e-4)
    bench.isa.nc_matmul(out, bench.of(left), bench.of(right))
    np.testing.assert_allclose(out.read(), 2 * left.T @ right, atol=2e-4)
    bench.isa.nc_matmul(out, bench.of(left), bench.of(right), accumulate=False)
    np.testing.assert_allclose(out.read(), left.T @ right, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 9, 40])
def test_the_neighbours_of_a_column_change_no_bit_of_it(bench: Any, columns: int) -> None:
    """The array sums each column down its own path, however many stream past."""
    left, right = _random(128, 64), _random(128, 40, seed=1)
    whole, part, narrow = (bench.fresh(*shape, buffer="psum") for shape in ((64, 40), (64, columns), (columns, 40)))
    bench.isa.nc_matmul(whole, bench.of(left), bench.of(right))
    bench.isa.nc_matmul(part, bench.of(left), bench.of(right[:, :columns]))
    bench.isa.nc_matmul(narrow, bench.of(left[:, :columns]), bench.of(right))
    np.testing.assert_array_equal(part.read(), whole.read()[:, :columns])
    np.testing.assert_array_equal(narrow.read(), whole.read()[:columns])


def test_matmul_of_double_rows_contracts_both_halves(bench: Any) -> None:
    left, right = np.ones((16, 2, 4)), np.full((16, 2, 8), 2.0)
    out = bench.fresh(4, 8, buffer="psum")
    mode = bench.isa.matmul_perf_mode.double_row
    bench.isa.nc_matmul(out, bench.of(left, "float8_e4m3"), bench.of(right, "float8_e5m2"), perf_mode=mode)
    np.testing.assert_array_equal(out.read(), np.full((4, 8), 64.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_transpose_moves_bits(bench: Any, dtype: str) -> None:
    values = np.arange(20).reshape(4, 5)
    source = bench.of(values, dtype)
    out = bench.after(lambda dst: bench.isa.nc_transpose(dst, source), 5, 4, dtype=dtype, buffer="psum")
    np.testing.assert_array_equal(out, values.T)
    identity = bench.of(np.eye(4), dtype)
    if dtype != "int32":
        moved = bench.fresh(5, 4, dtype=dtype, buffer="psum")
        bench.isa.nc_matmul(moved, source, identity, is_transpose=True)
        np.testing.assert_array_equal(moved.read(), values.T)
    small = bench.after(
        lambda dst: bench.isa.nc_transpose(dst, source, engine=bench.isa.engine.vector), 5, 4, dtype=dtype
    )
    np.testing.assert_array_equal(small, values.T)


def test_a_transpose_keeps_nan_where_it_is(bench: Any) -> None:
    values = _random(8, 8)
    values[2, 3] = np.nan
    out = bench.after(lambda dst: bench.isa.nc_transpose(dst, bench.of(values)), 8, 8, buffer="psum")
    np.testing.assert_array_equal(out, values.T)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("copy", lambda x: x),
        ("exp", np.exp),
        ("square", np.square),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("silu", lambda x: x / (1 + np.exp(-x))),
        ("softplus", lambda x: np.log1p(np.exp(x))),
        ("tanh", np.tanh),
        ("relu", lambda x: np.maximum(x, 0)),
        ("abs", np.abs),
        ("sign", np.sign),
    ],
)
def test_activation_computes_its_function_of_scaled_data(bench: Any, name: str, expected: Any) -> None:
    values, scale = _random(8, 16), np.abs(_random(8, 1, seed=1))
    out = bench.after(lambda dst: bench.isa.activation(dst, OPS[name], bench.of(values), scale=bench.of(scale)), 8, 16)
    np.testing.assert_allclose(out, expected(values * scale), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("rsqrt", lambda x: x**-0.5), ("sqrt", np.sqrt), ("log", np.log), ("reciprocal", lambda x: 1 / x)],
)
def test_activation_of_positive_data_adds_its_bias(bench: Any, name: str, expected: Any) -> None:
    values, bias = np.abs(_random(8, 16)), np.abs(_random(8, 1, seed=1)) + 0.1
    out = bench.after(lambda dst: bench.isa.activation(dst, OPS[name], bench.of(values), bias=bench.of(bias)), 8, 16)
    np.testing.assert_allclose(out, expected(values + bias), rtol=2e-6)


def test_activation_sums_over_calls(bench: Any) -> None:
    values = _random(8, 16)
    command, total = bench.isa.reduce_cmd, bench.fresh(8, 1)
    keywords = {"op": OPS["square"], "data": bench.of(values), "reduce_op": ADD}
    bench.isa.activation(bench.fresh(8, 16), reduce_cmd=command.reset_reduce, **keywords)
    bench.isa.activation(bench.fresh(8, 16), reduce_cmd=command.reduce, reduce_res=total, **keywords)
    np.testing.assert_allclose(total.read(), 2 * np.square(values).sum(1, keepdims=True), rtol=1e-5)
    bench.isa.activation_reduce(bench.fresh(8, 16), OPS["square"], bench.of(values), ADD, total)
    np.testing.assert_allclose(total.read(), np.square(values).sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("engine", ["vector", "scalar", "gpsimd"])
def test_tensor_copy_casts(bench: Any, engine: str) -> None:
    values = _random(8, 16)
    run = bench.isa.tensor_copy
    out = bench.after(lambda dst: run(dst, bench.of(values), engine=bench.isa.engine[engine]), 8, 16, dtype="float16")
    np.testing.assert_array_equal(out, values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(("name", "expected"), [("add", np.add), ("subtract", np.subtract), ("maximum", np.maximum)])
def test_tensor_tensor_is_element_by_element(bench: Any, name: str, expected: Any) -> None:
    a, b = _random(8, 16), _random(8, 16, seed=1)
    out = bench.after(lambda dst: bench.isa.tensor_tensor(dst, bench.of(a), bench.of(b), OPS[name]), 8, 16)
    np.testing.assert_array_equal(out, expected(a, b))


def test_tensor_tensor_of_integers_is_exact(bench: Any) -> None:
    a, b = np.array([[2**24 + 1, 7]]), np.array([[2, 12]])
    out = bench.after(
        lambda dst: bench.isa.tensor_tensor(dst, bench.of(a, "int32"), bench.of(b, "int32"), ADD), 1, 2, dtype="int32"
    )
    np.testing.assert_array_equal(out, a + b)
    bits = bench.after(
        lambda dst: bench.isa.tensor_tensor(dst, bench.of(a, "int32"), bench.of(b, "int32"), OPS["bitwise_and"]),
        1,
        2,
        dtype="int32",
    )
    np.testing.assert_array_equal(bits, a & b)


def test_tensor_scalar_applies_two_operators_in_the_asked_order(bench: Any) -> None:
    values, column = _random(8, 16), _random(8, 1, seed=1)

    def run(dst: Any) -> None:
        bench.isa.tensor_scalar(
            dst, bench.of(values), SUBTRACT, bench.of(column), reverse0=True, op1=SUBTRACT, operand1=3.0, reverse1=True
        )

    np.testing.assert_array_equal(bench.after(run, 8, 16), np.float32(3.0) - (column - values))
    unary = bench.after(lambda dst: bench.isa.tensor_scalar(dst, bench.of(values**2 + 1), OPS["rsqrt"]), 8, 16)
    np.testing.assert_allclose(unary, (values**2 + 1) ** -0.5, rtol=1e-6)
    shifted = bench.of([[5, 9]], "int32")
    out = bench.after(lambda dst: bench.isa.tensor_scalar(dst, shifted, OPS["left_shift"], 2), 1, 2, dtype="int32")
    np.testing.assert_array_equal(out, [[20, 36]])


def test_scalar_tensor_tensor_is_both_in_one_pass(bench: Any) -> None:
    a, b, column = _random(8, 16), _random(8, 16, seed=1), _random(8, 1, seed=2)

    def run(dst: Any) -> None:
        bench.isa.scalar_tensor_tensor(
            dst, bench.of(a), MULTIPLY, bench.of(column), SUBTRACT, bench.of(b), reverse1=True
        )

    np.testing.assert_array_equal(bench.after(run, 8, 16), b - a * column)


def test_predicated_copy_leaves_the_rest(bench: Any) -> None:
    a, b, chosen = _random(8, 16), _random(8, 16, seed=1), _random(8, 16, seed=2) > 0
    for reverse in (False, True):
        dst = bench.of(a)
        bench.isa.tensor_copy_predicated(dst, bench.of(b), bench.of(chosen, "uint8"), reverse_pred=reverse)
        np.testing.assert_array_equal(dst.read(), np.where(chosen != reverse, b, a))
    fresh = bench.fresh(8, 16)
    bench.isa.tensor_copy_predicated(fresh, 1.0, bench.of(chosen, "uint8"))
    with pytest.raises(UnwrittenRead):
        fresh.read()


def test_select_does_not_let_nan_through(bench: Any) -> None:
    values = np.array([[np.nan, 2.0, 5.0, np.inf]])
    chosen, top = bench.of([[0, 1, 1, 0]], "uint8"), bench.fresh(1, 1)
    command = bench.isa.reduce_cmd.reset_reduce
    out = bench.after(
        lambda dst: bench.isa.select_reduce(dst, chosen, bench.of(values), -1.0, reduce_res=top, reduce_cmd=command),
        1,
        4,
    )
    np.testing.assert_array_equal(out, [[-1.0, 2.0, 5.0, -1.0]])
    assert top.read().item() == 5.0
    causal = bench.after(
        lambda dst: bench.isa.affine_select(
            dst, [[-1, 4]], 1, bench.of(np.full((3, 4), np.nan)), 0.0, cmp_op=OPS["greater_equal"], offset=-9
        ),
        3,
        4,
    )
    np.testing.assert_array_equal(causal, np.zeros((3, 4)))


def test_affine_select_keeps_where_the_comparison_holds(bench: Any) -> None:
    values = _random(4, 4)

    def run(dst: Any) -> None:
        bench.isa.affine_select(dst, [[-1, 4]], 1, bench.of(values), -5.0, cmp_op=OPS["greater_equal"])

    np.testing.assert_array_equal(bench.after(run, 4, 4), np.where(np.tri(4), values, -5.0).astype(np.float32))


def test_iota_counts_partitions_and_pattern(bench: Any) -> None:
    out = bench.after(
        lambda dst: bench.isa.iota(dst, [[10, 2], [1, 3]], offset=5, channel_multiplier=100), 3, 6, dtype="int32"
    )
    np.testing.assert_array_equal(out, 5 + 100 * np.arange(3)[:, None] + np.array([0, 1, 2, 10, 11, 12]))


def test_tensor_reduce_takes_the_last_dimensions(bench: Any) -> None:
    values = _random(4, 2, 8)
    out = bench.after(lambda dst: bench.isa.tensor_reduce(dst, ADD, bench.of(values), 2, negate=True), 4, 2)
    np.testing.assert_allclose(out, -values.sum(2), rtol=1e-5, atol=1e-6)
    top = bench.after(lambda dst: bench.isa.tensor_reduce(dst, OPS["maximum"], bench.of(values), (1, 2)), 4, 1)
    np.testing.assert_array_equal(top, values.max((1, 2))[:, None])


def test_partition_reduce_adds_partitions(bench: Any) -> None:
    values = _random(16, 8)
    out = bench.after(lambda dst: bench.isa.tensor_partition_reduce(dst, ADD, bench.of(values)), 1, 8)
    np.testing.assert_allclose(out, values.sum(0, keepdims=True), rtol=1e-5, atol=1e-6)


def test_tensor_scalar_reduce_gives_both_results_and_goes_on(bench: Any) -> None:
    values, total = _random(4, 8), bench.fresh(4, 1)
    command = bench.isa.reduce_cmd
    run = bench.isa.tensor_scalar_reduce
    out = bench.after(lambda dst: run(dst, bench.of(values), MULTIPLY, 2.0, ADD, total), 4, 8)
    np.testing.assert_array_equal(out, 2 * values)
    run(
        bench.fresh(4, 8),
        bench.of(values),
        MULTIPLY,
        1.0,
        ADD,
        total,
        reduce_cmd=command.reduce,
        reduce_res_negate=True,
    )
    np.testing.assert_allclose(total.read(), -3 * values.sum(1, keepdims=True), rtol=1e-5, atol=1e-6)
    start = bench.of(np.full((4, 1), 10.0))
    run(
        bench.fresh(4, 8), bench.of(values), ADD, 0.0, MAXIMUM, total, reduce_cmd=command.load_reduce, reduce_init=start
    )
    np.testing.assert_array_equal(total.read(), np.maximum(values.max(1, keepdims=True), 10.0))


def test_cumulative_is_a_prefix_sum_in_one_instruction(bench: Any) -> None:
    values = _random(4, 64)
    run = bench.isa.tensor_scalar_cumulative
    out = bench.after(lambda dst: run(dst, bench.of(values), MULTIPLY, ADD, 1.0), 4, 64)
    np.testing.assert_allclose(out, np.cumsum(values, axis=1), rtol=1e-4, atol=1e-5)
    command = bench.isa.reduce_cmd
    on = bench.after(lambda dst: run(dst, bench.of(values), MULTIPLY, ADD, 1.0, reduce_cmd=command.reduce), 4, 64)
    np.testing.assert_allclose(on, np.cumsum(values, axis=1) + values.sum(1, keepdims=True), rtol=1e-4, atol=1e-5)
    top = bench.after(lambda dst: run(dst, bench.of(values), ADD, MAXIMUM, 0.0), 4, 64)
    np.testing.assert_array_equal(top, np.maximum.accumulate(values, axis=1))


def test_scan_is_a_recurrence(bench: Any) -> None:
    decay, values = np.abs(_random(4, 16)), _random(4, 16, seed=1)
    held, expected = np.full(4, 0.5, np.float32), np.empty((4, 16), np.float32)
    for i in range(16):
        held = decay[:, i] * held + values[:, i]
        expected[:, i] = held
    start = bench.of(np.full((4, 1), 0.5))
    out = bench.after(
        lambda dst: bench.isa.tensor_tensor_scan(dst, bench.of(decay), bench.of(values), start, MULTIPLY, ADD), 4, 16
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_reciprocal_divides(bench: Any) -> None:
    values = np.abs(_random(4, 8)) + 0.1
    out = bench.after(lambda dst: bench.isa.reciprocal(dst, bench.of(values)), 4, 8)
    np.testing.assert_array_equal(out, np.float32(1) / values)


def test_shuffle_moves_partitions_within_quadrants(bench: Any) -> None:
    values = _random(64, 4)
    mask = [255, *range(31)]
    dst = bench.of(np.zeros((64, 4)))
    bench.isa.nc_stream_shuffle(dst, bench.of(values), mask)
    out = dst.read()
    np.testing.assert_array_equal(out[1:32], values[0:31])
    np.testing.assert_array_equal(out[33:64], values[32:63])
    np.testing.assert_array_equal(out[[0, 32]], np.zeros((2, 4)))


def test_batch_norm_statistics_give_mean_and_variance(bench: Any) -> None:
    values, pieces = _random(4, 600), bench.fresh(4, 12)
    bench.isa.bn_stats(pieces[:, 0:6], bench.of(values[:, :512]))
    bench.isa.bn_stats(pieces[:, 6:12], bench.of(values[:, 512:]))
    out = bench.after(lambda dst: bench.isa.bn_aggr(dst, pieces), 4, 2)
    np.testing.assert_allclose(out, np.stack((values.mean(1), values.var(1)), 1), rtol=1e-5, atol=1e-6)


def test_max8_find_and_replace_agree_on_duplicates(bench: Any) -> None:
    data = bench.of([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]])
    top = bench.of(bench.after(lambda dst: bench.isa.max8(dst, data), 1, 8))
    np.testing.assert_array_equal(top.read(), [[8, 8, 8, 8, 8, 8, 8, 4]])
    found = bench.after(lambda dst: bench.isa.nc_find_index8(dst, data, top), 1, 8, dtype="uint32")
    np.testing.assert_array_equal(found, [[4, 5, 6, 7, 8, 9, 10, 3]])
    where = bench.fresh(1, 8, dtype="uint32")
    values = bench.of([[3, 8, 8, 8, 8, 8, 8, 8]])
    left = bench.after(lambda dst: bench.isa.nc_match_replace8(dst, data, values, -1.0, dst_idx=where), 1, 11)
    np.testing.assert_array_equal(where.read(), [[2, 10, 9, 8, 7, 6, 5, 4]])
    np.testing.assert_array_equal(left, [[1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1]])
    missing = bench.after(
        lambda dst: bench.isa.nc_find_index8(dst, data, bench.of([[9, 8, 8, 8, 8, 8, 8, 4]])), 1, 8, dtype="uint16"
    )
    assert missing[0, 0] == 0xFFFF


def test_memset_fills(bench: Any) -> None:
    np.testing.assert_array_equal(bench.after(lambda dst: bench.isa.memset(dst, 2.5), 2, 3), np.full((2, 3), 2.5))


def test_dma_casts_gathers_and_scatters(bench: Any) -> None:
    table = _random(16, 8)
    source = bench.of(table, buffer="private_hbm")
    out = bench.after(lambda dst: bench.isa.dma_copy(dst, source), 16, 8, dtype="float16")
    np.testing.assert_array_equal(out, table.astype(np.float16).astype(np.float32))
    index = bench.of([[3], [0], [15]], "uint32")
    rows = bench.after(
        lambda dst: bench.isa.dma_copy(dst, source.ap([[8, 3], [1, 8]], vector_offset=index, indirect_dim=0)), 3, 8
    )
    np.testing.assert_array_equal(rows, table[[3, 0, 15]])
    target = bench.hbm(16, 8)
    bench.isa.dma_copy(target.ap([[8, 3], [1, 8]], vector_offset=index), bench.of(rows))
    np.testing.assert_array_equal(target.read()[[3, 0, 15]], rows)
    assert np.count_nonzero(target.read().any(1)) == 3


def test_dma_at_a_register_or_a_loaded_scalar(bench: Any) -> None:
    table = _random(16, 8)
    source, seen = bench.of(table, buffer="private_hbm"), []

    def body(i: Any) -> None:
        tile = bench.fresh(1, 8)
        bench.isa.dma_copy(tile, source.ap([[8, 1], [1, 8]], scalar_offset=i, indirect_dim=0))
        seen.append(tile.read())

    bench.nl.fori_loop(0, bench.isa.register_alloc(16), body, step=5)
    np.testing.assert_array_equal(np.concatenate(seen), table[0:16:5])
    tile = bench.fresh(1, 8)
    bench.isa.dma_copy(tile, source.select(0, bench.of([[7]], "int32")))
    np.testing.assert_array_equal(tile.read(), table[7:8])


def test_dma_skips_what_is_out_of_bounds_when_asked(bench: Any) -> None:
    source, skip = bench.of(_random(4, 8), buffer="private_hbm"), bench.isa.oob_mode.skip
    tile = bench.of(np.zeros((2, 8)))
    index = bench.of([[9], [1]], "uint32")
    bench.isa.dma_copy(tile, source.ap([[8, 2], [1, 8]], vector_offset=index), oob_mode=skip)
    np.testing.assert_array_equal(tile.read()[0], np.zeros(8))
    np.testing.assert_array_equal(tile.read()[1], source.read()[1])
    bench.isa.dma_copy(tile[0:1], source.select(0, bench.isa.register_alloc(4)), oob_mode=skip)
    np.testing.assert_array_equal(tile.read()[0], np.zeros(8))


@pytest.mark.parametrize(("shape", "axes"), [((6, 4), (1, 0)), ((3, 2, 4), (2, 1, 0)), ((3, 2, 5, 4), (3, 1, 2, 0))])
def test_dma_transpose_permutes(bench: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    values = _random(*shape)
    out = bench.after(
        lambda dst: bench.isa.dma_transpose(dst, bench.of(values, buffer="private_hbm"), axes=axes),
        *(shape[a] for a in axes),
    )
    np.testing.assert_array_equal(out, values.transpose(axes))


def test_registers_move_load_and_store(bench: Any) -> None:
    a, b = bench.isa.register_alloc(5), bench.isa.register_alloc()
    bench.isa.register_move(dst=b, src=a)
    out = bench.fresh(1, 1, dtype="int32")
    bench.isa.register_store(out, b)
    bench.isa.register_load(a, out)
    assert out.read().item() == a.value() == 5


def test_loops_run_as_python_loops(bench: Any) -> None:
    assert list(bench.nl.affine_range(3)) == [0, 1, 2]
    assert list(bench.nl.sequential_range(1, 7, 3)) == [1, 4]
    count = bench.isa.register_alloc(3)
    seen: list[int] = []

    def body(register: Any) -> Any:
        seen.append(register.value())
        return bench.isa.register_alloc(register.value() - 1)

    bench.nl.while_loop(count, body)
    assert seen == [3, 2, 1]


def test_constants_and_identities(bench: Any) -> None:
    values = _random(4, 4)
    np.testing.assert_array_equal(bench.nl.load(bench.nl.shared_constant(values)).read(), values)
    np.testing.assert_array_equal(bench.nl.shared_identity_matrix(4, "bfloat16").read(), np.eye(4))
    np.testing.assert_array_equal(bench.nl.ones((2, 2), "float32").read(), np.ones((2, 2)))
    assert bench.nl.broadcast_to(bench.tile(4, 1), (4, 3)).shape == (4, 3)
