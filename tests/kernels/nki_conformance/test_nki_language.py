"""nki.language on tiles: the wrappers that tutorials are written with. LANG, the same names."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def _random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("add", np.add),
        ("subtract", np.subtract),
        ("multiply", np.multiply),
        ("maximum", np.maximum),
        ("minimum", np.minimum),
        ("less", np.less),
    ],
)
def test_operators_on_two_tiles_or_a_tile_and_a_number(bench: Any, name: str, expected: Callable[..., Any]) -> None:
    x, y = _random(4, 8), _random(4, 8, seed=1)
    operator = getattr(bench.nl, name)

    def body() -> tuple[Any, ...]:
        left = bench.of(x)
        return operator(left, bench.of(y)), operator(left, 0.5), operator(0.5, left)

    wanted = (expected(x, y), expected(x, np.float32(0.5)), expected(np.float32(0.5), x))
    for found, one in zip(bench.run(body), wanted, strict=True):
        np.testing.assert_array_equal(found, one.astype(np.float32))


def test_a_dtype_is_that_of_the_first_tile_unless_another_is_asked_for(bench: Any) -> None:
    x = _random(4, 8)

    def body() -> tuple[Any, ...]:
        half = bench.of(x, "float16")
        return bench.nl.add(half, 1.0), bench.nl.exp(half, dtype=bench.nl.float32)

    added, powers = bench.run(body)
    assert (added.dtype, powers.dtype) == (np.float16, np.float32)
    np.testing.assert_allclose(powers, np.exp(x.astype(np.float16).astype(np.float32)), rtol=1e-6)


_erf = np.vectorize(math.erf)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exp", np.exp),
        ("square", np.square),
        ("relu", lambda x: np.maximum(x, 0)),
        ("tanh", np.tanh),
        ("erf", _erf),
        ("erf_dx", lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
        ("gelu", lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2)))),
        ("gelu_apprx_sigmoid", lambda x: x / (1 + np.exp(-1.702 * x))),
        ("silu", lambda x: x / (1 + np.exp(-x))),
        ("mish", lambda x: x * np.tanh(np.log1p(np.exp(x)))),
        ("sin", np.sin),
    ],
)
def test_functions_of_a_tile(bench: Any, name: str, expected: Callable[[Any], Any]) -> None:
    x = _random(4, 8)
    out = bench.run(lambda: getattr(bench.nl, name)(bench.of(x)))
    np.testing.assert_allclose(out, expected(x.astype(np.float64)), rtol=1e-5, atol=1e-6)


def test_a_sine_is_that_of_the_angle_however_large(bench: Any) -> None:
    """SHARED nki-act-func: the activation is valid from -pi to pi, `nl.sin` over the full domain."""
    x = np.linspace(-40, 40, 333, dtype=np.float32)[None]
    x[0, :4] = np.float32(np.pi), -np.float32(np.pi), 9.0, 0.0
    out = bench.run(lambda: bench.nl.sin(bench.of(x)))
    np.testing.assert_allclose(out, np.sin(x.astype(np.float64)), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "function"),
    [("silu_dx", "silu"), ("gelu_dx", "gelu"), ("gelu_apprx_sigmoid_dx", "gelu_apprx_sigmoid"), ("erf_dx", "erf")],
)
def test_a_derivative_is_the_slope_of_its_function(bench: Any, name: str, function: str) -> None:
    x, step = np.linspace(-3, 3, 32, dtype=np.float32)[None], np.float32(2.0**-5)

    def body() -> tuple[Any, ...]:
        value, slope = getattr(bench.nl, function), getattr(bench.nl, name)
        return slope(bench.of(x)), value(bench.of(x + step)), value(bench.of(x - step))

    slope, above, below = bench.run(body)
    np.testing.assert_allclose(slope, (above - below) / (2 * step), atol=2e-3)


def test_reductions_over_the_last_dimensions(bench: Any) -> None:
    x = _random(4, 2, 8)

    def body() -> tuple[Any, ...]:
        nl, tile = bench.nl, bench.of(x)
        kept = nl.max(tile, axis=2, keepdims=True)
        return nl.sum(tile, axis=[1, 2]), nl.max(tile, axis=2), nl.min(tile, axis=-1), nl.mean(tile, axis=(1, 2)), kept

    total, largest, least, mean, kept = bench.run(body)
    np.testing.assert_allclose(total, x.sum((1, 2))[:, None], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(largest, x.max(2))
    np.testing.assert_array_equal(least, x.min(2))
    np.testing.assert_allclose(mean, x.mean((1, 2))[:, None], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(kept, x.max(2, keepdims=True))


def test_softmax_sums_to_one_and_does_not_overflow(bench: Any) -> None:
    x = 100 * _random(4, 16)
    out = bench.run(lambda: bench.nl.softmax(bench.of(x), axis=1))
    powers = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, powers / powers.sum(1, keepdims=True), rtol=1e-4, atol=1e-7)


def test_matmul_and_transpose_land_in_psum(bench: Any) -> None:
    left, right = _random(16, 4), _random(16, 8, seed=1)

    def body() -> tuple[Any, ...]:
        product = bench.nl.matmul(bench.of(left), bench.of(right), transpose_x=True)
        turned = bench.nl.transpose(bench.of(left))
        assert product.buffer == turned.buffer == bench.nl.psum
        return product, turned, bench.nl.copy(product)

    product, turned, copied = bench.run(body)
    np.testing.assert_allclose(product, left.T @ right, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(turned, left.T)
    np.testing.assert_array_equal(copied, product)


def test_a_load_can_transpose(bench: Any) -> None:
    x = _random(6, 4)
    np.testing.assert_array_equal(bench.run(lambda: bench.nl.load_transpose2d(bench.of(x, buffer="private_hbm"))), x.T)


@pytest.mark.parametrize(
    ("shape", "wide"), [((4, 1), (4, 3)), ((1, 700), (5, 700)), ((1, 1, 6), (3, 2, 6)), ((4, 3), (4, 3))]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_broadcast_repeats_free_dimensions_and_the_partition(
    bench: Any, shape: tuple[int, ...], wide: tuple[int, ...], dtype: str
) -> None:
    x = np.round(8 * _random(*shape))
    np.testing.assert_array_equal(
        bench.run(lambda: bench.nl.broadcast_to(bench.of(x, dtype), wide)), np.broadcast_to(x, wide)
    )


def test_a_broadcast_can_cast(bench: Any) -> None:
    out = bench.run(lambda: bench.nl.broadcast_to(bench.of([[2.5]]), (1, 3), dtype=bench.nl.float16))
    assert out.dtype == np.float16
    np.testing.assert_array_equal(out, np.full((1, 3), 2.5))


def test_dimensions_of_one_are_added(bench: Any) -> None:
    x = _random(4, 8)
    np.testing.assert_array_equal(bench.run(lambda: bench.nl.expand_dims(bench.of(x), 1)), x[:, None])


def test_a_tensor_like_another(bench: Any) -> None:
    def body() -> Any:
        like = bench.of(_random(4, 8), "float16")
        fresh = bench.nl.empty_like(like, dtype=bench.nl.float32)
        bench.isa.memset(fresh, 2.0)
        return bench.nl.zeros_like(like), fresh

    zeros, fresh = bench.run(body)
    assert (zeros.dtype, fresh.dtype) == (np.float16, np.float32)
    np.testing.assert_array_equal(zeros, np.zeros((4, 8)))
    np.testing.assert_array_equal(fresh, np.full((4, 8), 2.0))


def test_values_can_be_printed_from_within_a_kernel(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run(lambda: bench.nl.device_print("found", bench.of([[1.5, -2.25]])))
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("found", "1.5", "-2.25"))
