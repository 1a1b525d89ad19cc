"""The cost model: each constant has a source, and each rule of the documents is in the estimates."""

import ast
import inspect
from typing import Any

import pytest

from warmstate.kernels.nki_sim import cost, cost_constants
from warmstate.kernels.nki_sim.operators import OPERATORS as OPS
from warmstate.kernels.nki_sim.program import current


def _last(bench: Any) -> Any:
    return current().trace.instructions[-1]


def test_every_constant_is_followed_by_its_source() -> None:
    body = ast.parse(inspect.getsource(cost_constants)).body
    for i, node in enumerate(body):
        if isinstance(node, ast.Assign):
            after = body[i + 1]
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            text = str(after.value.value)
            assert any(source in text for source in ("TRN1", "TRN2", "SHARED", "ISA", "DMA", "ASSUMED")), text


@pytest.mark.parametrize(("dtype", "cycles"), [("bfloat16", 512), ("float32", 4 * 512)])
def test_a_matmul_streams_its_moving_columns(bench: Any, dtype: str, cycles: int) -> None:
    bench.isa.nc_matmul(bench.fresh(128, 512, buffer="psum"), bench.tile(128, 128, dtype), bench.tile(128, 512, dtype))
    assert _last(bench).busy_ns == pytest.approx((cycles / 2.4, cycles / 2.4))


def test_a_narrow_matmul_costs_the_least_interval(bench: Any) -> None:
    bench.isa.nc_matmul(
        bench.fresh(64, 1, buffer="psum"), bench.tile(128, 64, "bfloat16"), bench.tile(128, 1, "bfloat16")
    )
    assert _last(bench).busy_ns[0] == pytest.approx(64 / 2.4)


def test_two_inputs_cost_one_or_two_passes(bench: Any) -> None:
    bench.isa.tensor_tensor(bench.tile(128, 512), bench.tile(128, 512), bench.tile(128, 512), OPS["add"])
    assert _last(bench).busy_ns == pytest.approx((512 / 0.96, 1024 / 0.96))


def test_two_byte_copies_are_fast_in_sbuf_and_less_so_from_psum(bench: Any) -> None:
    bench.isa.tensor_copy(bench.tile(128, 1024, "bfloat16"), bench.tile(128, 1024, "bfloat16"))
    assert _last(bench).busy_ns[0] == pytest.approx(256 / 0.96)
    bench.isa.tensor_copy(bench.tile(128, 1024, "bfloat16"), bench.psum(128, 1024, "bfloat16"))
    assert _last(bench).busy_ns[0] == pytest.approx(512 / 0.96)
    bench.isa.tensor_copy(bench.tile(128, 1024), bench.tile(128, 1024, "bfloat16"))
    assert _last(bench).busy_ns[0] == pytest.approx(1024 / 0.96)


def test_reciprocal_is_eight_times_slower_on_the_vector_engine(bench: Any) -> None:
    bench.isa.reciprocal(bench.tile(128, 64), bench.of([[1.0] * 64] * 128))
    assert _last(bench).busy_ns[0] == pytest.approx(8 * 64 / 0.96)


def test_long_runs_move_faster_than_short_ones() -> None:
    short, long = cost.dma(2**20, 256, 1.0)[0], cost.dma(2**20, 4096, 1.0)[0]
    assert long < 2**20 / 368 * 1.1
    assert short > 1.8 * long
