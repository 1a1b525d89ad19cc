"""What only our simulator has: memory that must be written before it is read, and rules that no kernel can break."""

from typing import Any

import pytest

from warmstate.kernels.nki_sim.errors import ConstraintViolation, UnwrittenRead
from warmstate.kernels.nki_sim.language import namespace


def test_fresh_memory_cannot_be_read(bench: Any) -> None:
    """AWS's simulator gives NaN instead (SDK, `nki/guides/nki_simulator.rst`)."""
    with pytest.raises(UnwrittenRead):
        bench.isa.tensor_copy(bench.tile(4, 4), bench.fresh(4, 4))
    half = bench.fresh(4, 4)
    bench.isa.memset(half[:, 0:2], 1.0)
    bench.isa.tensor_copy(bench.tile(4, 2), half[:, 0:2])
    with pytest.raises(UnwrittenRead):
        bench.isa.tensor_copy(bench.tile(4, 2), half[:, 1:3])


def test_a_predicated_copy_writes_only_what_it_chose(bench: Any) -> None:
    fresh = bench.fresh(2, 2)
    bench.isa.tensor_copy_predicated(fresh, 1.0, bench.of([[1, 0], [1, 1]], "uint8"))
    assert fresh[:, 0].read().tolist() == [[1.0], [1.0]]
    with pytest.raises(UnwrittenRead):
        fresh.read()


def test_a_view_knows_its_pattern(bench: Any) -> None:
    assert bench.tile(4, 24).get_pattern() == [[24, 4], [1, 24]]


def test_an_instruction_outside_a_kernel_is_an_error() -> None:
    with pytest.raises(ConstraintViolation, match="inside-kernel"):
        namespace()["ndarray"]((4, 4), "float32")


def test_a_gather_is_no_compute_operand(bench: Any) -> None:
    """Only a hand-made view can be a gather on chip."""
    index = bench.of([[0], [0], [0], [0]], "uint32")
    rows = bench.hbm(16, 64).ap([[64, 4], [1, 64]], vector_offset=index)
    rows.storage.buffer = "sbuf"
    with pytest.raises(ConstraintViolation, match="static-operand"):
        bench.isa.tensor_copy(bench.tile(4), rows)
