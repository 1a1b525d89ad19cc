"""Launches: cores share their outputs, arguments can be written and returned, a kernel calls a kernel. API nki.jit."""

from typing import Any

import numpy as np
import pytest
import torch


def _halves(bench: Any) -> Any:
    """A kernel of which each core doubles its share of the rows."""
    nl, isa = bench.nl, bench.isa

    def kernel(x: Any) -> Any:
        rows = x.shape[0] // nl.num_programs(0)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        mine = nl.ds(nl.program_id(0) * rows, rows)
        tile = nl.load(x[mine, :])
        isa.tensor_scalar(tile, tile, nl.multiply, 2.0)
        nl.store(out[mine, :], tile)
        return out

    return kernel


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_cores_share_the_output(bench: Any, cores: int, dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(dtype)
    out = bench.launch(_halves(bench), x, cores=cores)
    assert isinstance(out, np.ndarray)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, 2 * x)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("as_torch", [False, True])
def test_an_argument_that_is_written_is_returned_and_updated_in_place(bench: Any, cores: int, as_torch: bool) -> None:
    """SDK, `nki/guides/nki_simulator.rst`: "Input arrays are updated in-place"."""

    def kernel(state: Any, kept: Any) -> Any:
        bench.nl.store(state[1:3], bench.tile(2, 4))
        return state, kept

    state, kept = (np.ones((4, 4), np.float32) for _ in range(2))
    given = (torch.from_numpy(state), torch.from_numpy(kept)) if as_torch else (state, kept)
    returned, same = bench.launch(kernel, *given, cores=cores)
    expected = np.ones((4, 4), np.float32)
    expected[1:3] = 0
    for found, wanted in ((returned, expected), (state, expected), (same, kept), (kept, np.ones((4, 4)))):
        np.testing.assert_array_equal(np.asarray(found), wanted)


def test_a_kernel_that_calls_a_kernel_inlines_it(bench: Any) -> None:
    inner = bench.nki.jit(_halves(bench))
    out = bench.launch(lambda x: inner(inner(x)), np.ones((4, 4), np.float32))
    np.testing.assert_array_equal(out, np.full((4, 4), 4.0))


def test_trace_time_numbers_are_arguments(bench: Any) -> None:
    def kernel(x: Any, factor: float, twice: bool = False) -> Any:
        nl, out, tile = bench.nl, bench.fresh(*x.shape, buffer="shared_hbm"), bench.nl.load(x)
        for _ in range(2 if twice else 1):
            bench.isa.tensor_scalar(tile, tile, nl.multiply, factor)
        nl.store(out, tile)
        return out

    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(bench.launch(kernel, x, 3.0), 3 * x)
    np.testing.assert_array_equal(bench.launch(kernel, x, 3.0, True), 9 * x)
