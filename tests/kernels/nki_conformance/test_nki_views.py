"""Memory and views: what can be read, what an index keeps, and which bytes a view has. LANG NkiTensor."""

from typing import Any

import numpy as np
import pytest


def _random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "key", [(slice(0, 5),), (slice(0, 4), slice(2, 9)), (4,), (slice(2, 2),), (0, 0, 0), (slice(3, 1),)]
)
def test_an_index_out_of_range_is_an_error(bench: Any, key: Any) -> None:
    with pytest.raises(bench.refusal):
        bench.run(lambda: bench.tile(4, 8)[key])


def test_a_pattern_out_of_range_is_an_error(bench: Any) -> None:
    with pytest.raises(bench.refusal):
        bench.run(lambda: bench.tile(4, 8).ap([[8, 4], [1, 9]]))


def test_an_integer_index_keeps_the_partition_and_drops_dimensions_of_hbm(bench: Any) -> None:
    shapes: list[tuple[int, ...]] = []

    def body() -> None:
        tile = bench.tile(4, 8)
        views = (tile[2], tile[:, 3], bench.hbm(4, 8, 2)[1], bench.hbm(4)[1], tile[bench.nl.ds(1, 2), -2:])
        shapes.extend(tuple(view.shape) for view in views)

    bench.run(body)
    assert shapes == [(1, 8), (4, 1), (8, 2), (1,), (2, 2)]


def test_views_share_their_bytes(bench: Any) -> None:
    values = _random(4, 24)

    def body() -> tuple[Any, ...]:
        tile = bench.of(values)
        return (
            tile.reshape((4, 2, 12)).permute((0, 2, 1)),
            tile.reshape_dim(1, (2, -1)).flatten_dims(1, 2),
            tile[:, 1:9:3],
            tile.slice(1, 4, 8),
            tile[:, 0:1].broadcast(1, 5),
            tile.expand_dim(1).squeeze_dim(1)[:, 3:4],
            tile.view(bench.nl.int32),
            tile.ap([[24, 4], [0, 2], [2, 12]]),
        )

    expected = (
        values.reshape(4, 2, 12).transpose(0, 2, 1),
        values,
        values[:, 1:9:3],
        values[:, 4:8],
        np.repeat(values[:, :1], 5, axis=1),
        values[:, 3:4],
        values.view(np.int32),
        np.repeat(values[:, None, ::2], 2, axis=1),
    )
    for found, wanted in zip(bench.run(body), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_what_is_written_through_a_view_is_in_the_tensor(bench: Any) -> None:
    values = _random(4, 24)

    def body() -> Any:
        tile = bench.of(values)
        bench.isa.memset(tile.reshape((4, 2, 12)).permute((0, 2, 1))[:, 3], 7.0)
        return tile

    values.reshape(4, 2, 12)[:, :, 3] = 7.0
    np.testing.assert_array_equal(bench.run(body), values)


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


def test_constants_and_identities(bench: Any) -> None:
    values = _random(4, 4)

    def body() -> tuple[Any, ...]:
        nl = bench.nl
        identity = nl.shared_identity_matrix(4, nl.bfloat16)
        return (
            nl.load(nl.shared_constant(values)),
            identity,
            nl.ones((2, 2), nl.float32),
            nl.full((2, 2), 3.0, nl.float32),
        )

    constant, identity, ones, threes = bench.run(body)
    np.testing.assert_array_equal(constant, values)
    np.testing.assert_array_equal(identity, np.eye(4))
    np.testing.assert_array_equal(ones, np.ones((2, 2)))
    np.testing.assert_array_equal(threes, np.full((2, 2), 3.0))
