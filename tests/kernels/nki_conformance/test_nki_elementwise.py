"""Element by element: activations, copies, arithmetic, selects and patterns. ISA, the functions of the same names."""

from typing import Any

import numpy as np
import pytest


def _random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


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
        ("gelu_apprx_tanh", lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    ],
)
def test_activation_computes_its_function_of_scaled_data(bench: Any, name: str, expected: Any) -> None:
    values, scale = _random(8, 16), np.abs(_random(8, 1, seed=1))

    def instruction(dst: Any) -> None:
        bench.isa.activation(dst, getattr(bench.nl, name), bench.of(values), scale=bench.of(scale))

    np.testing.assert_allclose(bench.after(instruction, 8, 16), expected(values * scale), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("rsqrt", lambda x: x**-0.5), ("sqrt", np.sqrt), ("log", np.log), ("reciprocal", lambda x: 1 / x)],
)
def test_activation_of_positive_data_adds_its_bias(bench: Any, name: str, expected: Any) -> None:
    values, bias = np.abs(_random(8, 16)), np.abs(_random(8, 1, seed=1)) + 0.1

    def instruction(dst: Any) -> None:
        bench.isa.activation(dst, getattr(bench.nl, name), bench.of(values), bias=bench.of(bias))

    np.testing.assert_allclose(bench.after(instruction, 8, 16), expected(values + bias), rtol=2e-6)


@pytest.mark.parametrize("name", ["exp", "softplus", "silu", "sigmoid", "tanh"])
def test_an_activation_of_large_data_is_its_limit(bench: Any, name: str) -> None:
    """As IEEE has it: exp overflows to inf, and nothing else of these gives NaN."""
    limits = {"exp": (0, np.inf), "softplus": (0, 500), "silu": (0, 500), "sigmoid": (0, 1), "tanh": (-1, 1)}
    data = np.array([[-500.0, 500.0]])
    out = bench.after(lambda dst: bench.isa.activation(dst, getattr(bench.nl, name), bench.of(data)), 1, 2)
    np.testing.assert_array_equal(out, np.array([limits[name]], np.float32))


def test_activation_sums_over_calls(bench: Any) -> None:
    values = _random(8, 16)

    def body() -> Any:
        isa, nl, data = bench.isa, bench.nl, bench.of(values)
        twice, once = bench.fresh(8, 1), bench.fresh(8, 1)
        squares = {"op": nl.square, "data": data, "reduce_op": nl.add}
        isa.activation(bench.fresh(8, 16), reduce_cmd=isa.reduce_cmd.reset_reduce, **squares)
        isa.activation(bench.fresh(8, 16), reduce_cmd=isa.reduce_cmd.reduce, reduce_res=twice, **squares)
        isa.activation_reduce(bench.fresh(8, 16), nl.square, data, nl.add, once)
        return twice, once

    twice, once = bench.run(body)
    np.testing.assert_allclose(once, np.square(values).sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(twice, 2 * np.square(values).sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("engine", ["vector", "scalar", "gpsimd"])
def test_tensor_copy_casts(bench: Any, engine: str) -> None:
    values = _random(8, 16)

    def instruction(dst: Any) -> None:
        bench.isa.tensor_copy(dst, bench.of(values), engine=getattr(bench.isa.engine, engine))

    np.testing.assert_array_equal(bench.after(instruction, 8, 16, dtype="float16"), values.astype(np.float16))


@pytest.mark.parametrize(("name", "expected"), [("add", np.add), ("subtract", np.subtract), ("maximum", np.maximum)])
def test_tensor_tensor_is_element_by_element(bench: Any, name: str, expected: Any) -> None:
    a, b = _random(8, 16), _random(8, 16, seed=1)

    def instruction(dst: Any) -> None:
        bench.isa.tensor_tensor(dst, bench.of(a), bench.of(b), getattr(bench.nl, name))

    np.testing.assert_array_equal(bench.after(instruction, 8, 16), expected(a, b))


@pytest.mark.parametrize(("name", "expected"), [("add", np.add), ("bitwise_and", np.bitwise_and)])
def test_tensor_tensor_of_integers_is_exact(bench: Any, name: str, expected: Any) -> None:
    a, b = np.array([[2**24 + 1, 7]], np.int32), np.array([[2, 12]], np.int32)

    def instruction(dst: Any) -> None:
        bench.isa.tensor_tensor(dst, bench.of(a, "int32"), bench.of(b, "int32"), getattr(bench.nl, name))

    np.testing.assert_array_equal(bench.after(instruction, 1, 2, dtype="int32"), expected(a, b))


def test_tensor_scalar_applies_two_operators_in_the_asked_order(bench: Any) -> None:
    values, column = _random(8, 16), _random(8, 1, seed=1)

    def instruction(dst: Any) -> None:
        minus = bench.nl.subtract
        one, other = {"op0": minus, "operand0": bench.of(column)}, {"op1": minus, "operand1": 3.0}
        bench.isa.tensor_scalar(dst, bench.of(values), **one, reverse0=True, **other, reverse1=True)

    np.testing.assert_array_equal(bench.after(instruction, 8, 16), np.float32(3.0) - (column - values))


def test_tensor_scalar_has_unary_and_bit_operators(bench: Any) -> None:
    values = np.square(_random(8, 16)) + 1
    root = bench.after(lambda dst: bench.isa.tensor_scalar(dst, bench.of(values), bench.nl.rsqrt), 8, 16)
    np.testing.assert_allclose(root, values**-0.5, rtol=1e-6)

    def shift(dst: Any) -> None:
        bench.isa.tensor_scalar(dst, bench.of([[5, 9]], "int32"), bench.nl.left_shift, 2)

    np.testing.assert_array_equal(bench.after(shift, 1, 2, dtype="int32"), [[20, 36]])


def test_scalar_tensor_tensor_is_both_in_one_pass(bench: Any) -> None:
    a, b, column = _random(8, 16), _random(8, 16, seed=1), _random(8, 1, seed=2)

    def instruction(dst: Any) -> None:
        operands = (bench.of(a), bench.nl.multiply, bench.of(column), bench.nl.subtract, bench.of(b))
        bench.isa.scalar_tensor_tensor(dst, *operands, reverse1=True)

    np.testing.assert_array_equal(bench.after(instruction, 8, 16), b - a * column)


@pytest.mark.parametrize("reverse", [False, True])
def test_predicated_copy_leaves_the_rest(bench: Any, reverse: bool) -> None:
    a, b, chosen = _random(8, 16), _random(8, 16, seed=1), _random(8, 16, seed=2) > 0

    def body() -> Any:
        dst = bench.of(a)
        bench.isa.tensor_copy_predicated(dst, bench.of(b), bench.of(chosen, "uint8"), reverse_pred=reverse)
        return dst

    np.testing.assert_array_equal(bench.run(body), np.where(chosen != reverse, b, a))


def test_select_does_not_let_nan_through(bench: Any) -> None:
    values = np.array([[np.nan, 2.0, 5.0, np.inf]])

    def body() -> Any:
        isa, out, top = bench.isa, bench.fresh(1, 4), bench.fresh(1, 1)
        chosen, command = bench.of([[0, 1, 1, 0]], "uint8"), isa.reduce_cmd.reset_reduce
        isa.select_reduce(out, chosen, bench.of(values), -1.0, reduce_res=top, reduce_cmd=command)
        return out, top

    out, top = bench.run(body)
    np.testing.assert_array_equal(out, [[-1.0, 2.0, 5.0, -1.0]])
    assert top.item() == 5.0


def test_affine_select_keeps_where_the_comparison_holds(bench: Any) -> None:
    values = _random(4, 4)
    values[0, 3] = np.nan

    def instruction(dst: Any) -> None:
        bench.isa.affine_select(dst, [[-1, 4]], 1, bench.of(values), -5.0, cmp_op=bench.nl.greater_equal)

    np.testing.assert_array_equal(bench.after(instruction, 4, 4), np.where(np.tri(4), values, -5.0).astype(np.float32))

    def nothing(dst: Any) -> None:
        bench.isa.affine_select(dst, [[-1, 4]], 1, bench.of(values), 0.0, cmp_op=bench.nl.greater_equal, offset=-9)

    np.testing.assert_array_equal(bench.after(nothing, 4, 4), np.zeros((4, 4)))


def test_iota_counts_partitions_and_pattern(bench: Any) -> None:
    def instruction(dst: Any) -> None:
        bench.isa.iota(dst, [[10, 2], [1, 3]], offset=5, channel_multiplier=100)

    expected = 5 + 100 * np.arange(3)[:, None] + np.array([0, 1, 2, 10, 11, 12])
    np.testing.assert_array_equal(bench.after(instruction, 3, 6, dtype="int32"), expected)


def test_reciprocal_divides(bench: Any) -> None:
    values = np.abs(_random(4, 8)) + 0.1
    out = bench.after(lambda dst: bench.isa.reciprocal(dst, bench.of(values)), 4, 8)
    np.testing.assert_array_equal(out, np.float32(1) / values)


def test_memset_fills(bench: Any) -> None:
    np.testing.assert_array_equal(bench.after(lambda dst: bench.isa.memset(dst, 2.5), 2, 3), np.full((2, 3), 2.5))
