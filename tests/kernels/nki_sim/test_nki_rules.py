"""Every constraint of the simulator is broken here, and is found: at least one case for each rule."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from warmstate.kernels.nki_sim import isa, launch
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.language import namespace
from warmstate.kernels.nki_sim.operators import OPERATORS as OPS
from warmstate.kernels.nki_sim.rules import RULES

Case = Callable[[Any], Any]

ADD, MULTIPLY, COPY, EXP = OPS["add"], OPS["multiply"], OPS["copy"], OPS["exp"]


def _indices(b: Any, partitions: int = 4) -> Any:
    return b.of(np.zeros((partitions, 1)), "uint32")


def _rows(b: Any) -> Any:
    return b.hbm(16, 64).ap([[64, 4], [1, 64]], vector_offset=_indices(b))


def _mm(b: Any, **changed: Any) -> None:
    operands = {"dst": b.fresh(64, 64, buffer="psum"), "stationary": b.tile(), "moving": b.tile()}
    b.isa.nc_matmul(**(operands | changed))


def _too_wide_matmul(b: Any) -> None:
    b.isa.nc_matmul(b.fresh(64, 1024, buffer="psum"), b.tile(), b.tile(128, 1024))


def _unsettled(b: Any) -> None:
    out = b.fresh(64, 128, buffer="psum")
    _mm(b, dst=out[:, 0:64])
    b.isa.nc_matmul(out, b.tile(), b.tile(128, 128))


def _onto_memset(b: Any, accumulate: bool | None) -> None:
    _mm(b, dst=b.psum(64, 64), accumulate=accumulate)


def _across_banks(b: Any) -> None:
    _mm(b, dst=b.fresh(64, 1024, buffer="psum")[:, 480:544])


def _launch(body: Callable[[Any], Any], cores: int = 1) -> None:
    b = SimpleNamespace(nl=SimpleNamespace(**namespace()), isa=SimpleNamespace(**isa.namespace()))
    launch.launch(launch.Kernel(lambda _x: body(b))[cores], np.zeros((2, 2), np.float32))


def _partly_written(b: Any) -> Any:
    out = b.nl.ndarray((4, 4), "float32", "shared_hbm")
    b.nl.store(out[0:2], b.nl.zeros((2, 4), "float32"))
    return out


def _diverging(b: Any) -> Any:
    out = b.nl.ndarray((4, 4 + b.nl.program_id(0)), "float32", "shared_hbm")
    b.nl.store(out, b.nl.zeros(out.shape, "float32"))
    return out


def _alone(b: Any) -> Any:
    return [b.nl.ndarray((4, 4), "float32", "shared_hbm") for _ in range(b.nl.program_id(0))]


def _overfull(b: Any) -> None:
    tiles = [b.nl.zeros((2, 30 * 1024), "float32") for _ in range(3)]
    b.isa.tensor_copy(tiles[0], tiles[1])
    b.isa.tensor_copy(tiles[1], tiles[2])


CASES: dict[str, list[Case]] = {
    "on-chip-rank": [lambda b: b.nl.ndarray((128,), "float32")],
    "positive-shape": [lambda b: b.fresh(4, 0), lambda b: b.nl.ndarray((), "float32")],
    "known-buffer": [lambda b: b.nl.ndarray((4, 4), "float32", "hbm")],
    "known-dtype": [lambda b: b.fresh(4, 4, dtype="float64")],
    "partition-limit": [lambda b: b.fresh(129, 4)],
    "psum-size": [lambda b: b.fresh(128, 4097, buffer="psum")],
    "sbuf-size": [lambda b: b.fresh(128, 224 * 256 + 1)],
    "partition-reshape": [
        lambda b: b.tile().reshape((64, 128)),
        lambda b: b.tile().expand_dim(0),
        lambda b: b.tile(1).squeeze_dim(0),
        lambda b: b.tile().reshape_dim(0, (2, 64)),
    ],
    "contiguous-reshape": [
        lambda b: b.tile(128, 64)[:, 0:32].reshape_dim(1, (4, 8)).permute((0, 2, 1)).reshape((128, 32))
    ],
    "reshape-size": [lambda b: b.tile().reshape((128, 63)), lambda b: b.tile().reshape_dim(1, (3, 5))],
    "partition-permute": [lambda b: b.tile().permute((1, 0))],
    "permutation": [lambda b: b.tile().permute((0, 0))],
    "broadcast-size-1": [lambda b: b.tile().broadcast(1, 64)],
    "broadcast-partition": [lambda b: b.tile(1).broadcast(0, 64)],
    "squeeze-size-1": [lambda b: b.tile().squeeze_dim(1)],
    "view-dtype": [lambda b: b.tile(4, 3, "bfloat16").view("float32"), lambda b: b.tile()[:, 0:64:2].view("int32")],
    "one-dynamic-select": [
        lambda b: _rows(b).select(1, b.isa.register_alloc(0)),
        lambda b: b.hbm(4, 4).ap([[4, 4], [1, 4]], scalar_offset=b.isa.register_alloc(0), vector_offset=_indices(b)),
    ],
    "vector-offset-hbm": [lambda b: b.tile(16).ap([[64, 4], [1, 64]], vector_offset=_indices(b))],
    "vector-offset-shape": [
        lambda b: b.hbm(16, 64).ap([[64, 4], [1, 64]], vector_offset=_indices(b, 5)),
        lambda b: b.hbm(16, 64).ap([[64, 4], [1, 64]], vector_offset=b.tile(4, 1, "uint16")),
    ],
    "scalar-offset-shape": [
        lambda b: b.hbm(4, 4).select(0, b.tile(1, 1)),
        lambda b: b.hbm(4, 4).select(0, b.tile(2, 1, "uint32")),
    ],
    "no-assignment": [lambda b: b.tile().__setitem__((0, 0), 1.0)],
    "output-written": [lambda b: _launch(_partly_written)],
    "output-shared-hbm": [lambda b: _launch(lambda inner: inner.nl.zeros((4, 4), "float32"))],
    "lnc-count": [lambda b: launch.Kernel(print)[3]],
    "same-control-flow": [lambda b: _launch(_diverging, 2), lambda b: _launch(_alone, 2)],
    "register-value": [
        lambda b: b.isa.register_alloc().value(),
        lambda b: b.isa.register_alloc(1.5),
        lambda b: b.isa.register_load(b.isa.register_alloc(), b.tile(1, 1)),
    ],
    "loop-step": [lambda b: b.nl.fori_loop(0, 4, print, step=0)],
    "capacity": [lambda b: _launch(_overfull)],
    "on-chip-operand": [
        lambda b: b.isa.tensor_copy(b.hbm(4, 4), b.tile(4, 4)),
        lambda b: b.isa.dma_copy(b.tile(), 1.0),
    ],
    "start-partition": [
        lambda b: b.isa.tensor_copy(b.tile(128)[1:65], b.tile(64)),
        lambda b: b.isa.tensor_copy(b.tile(128)[32:96], b.tile(64)),
        lambda b: b.isa.tensor_copy(b.tile(128)[16:32], b.tile(16)),
    ],
    "partition-stride": [lambda b: b.isa.tensor_copy(b.tile(4), b.tile(8)[0:8:2])],
    "free-dims": [lambda b: b.isa.tensor_copy(b.tile(4), b.tile(4).reshape((4, 2, 2, 2, 2, 4)))],
    "same-partitions": [
        lambda b: b.isa.tensor_tensor(b.tile(64), b.tile(64), b.tile(32), ADD),
        lambda b: b.isa.max8(b.tile(4, 8), b.tile(8, 16)),
        lambda b: b.isa.tensor_reduce(b.tile(8, 1), ADD, b.tile(4, 8), 1),
    ],
    "same-elements": [
        lambda b: b.isa.tensor_copy(b.tile(4, 8), b.tile(4, 9)),
        lambda b: b.isa.tensor_reduce(b.tile(4, 2), ADD, b.tile(4, 8), 1),
    ],
    "both-psum": [
        lambda b: b.isa.tensor_tensor(b.tile(), b.psum(), b.psum(), ADD),
        lambda b: b.isa.scalar_tensor_tensor(b.tile(), b.psum(), ADD, 1.0, ADD, b.psum()),
        lambda b: b.isa.tensor_tensor_scan(b.tile(), b.psum(), b.psum(), 0.0, MULTIPLY, ADD),
    ],
    "gpsimd-psum": [
        lambda b: b.isa.tensor_copy(b.tile(), b.psum(), engine=b.isa.engine.gpsimd),
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.psum(), OPS["power"]),
        lambda b: b.isa.memset(b.psum(), 0.0, engine=b.isa.engine.gpsimd),
    ],
    "static-operand": [lambda b: b.isa.tensor_copy(b.tile(4), _as_on_chip(b))],
    "unknown-engine": [
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.tile(), ADD, engine=b.isa.engine.scalar),
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), OPS["rsqrt"], engine=b.isa.engine.vector),
    ],
    "bitvec-integers": [
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.tile(), OPS["bitwise_and"]),
        lambda b: b.isa.tensor_scalar(b.tile(4, 4, "int32"), b.tile(4, 4, "int32"), OPS["left_shift"], 1.5),
    ],
    "known-operator": [
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.tile(), EXP),
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.tile(), np.add),
        lambda b: b.isa.scalar_tensor_tensor(b.tile(), b.tile(), OPS["bitwise_or"], 1.0, ADD, b.tile()),
    ],
    "vector-operand-shape": [lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), ADD, b.tile(128, 2))],
    "vector-operand-float32": [
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), ADD, b.tile(128, 1, "bfloat16")),
        lambda b: b.isa.activation(b.tile(), EXP, b.tile(), scale=b.tile(128, 1, "bfloat16")),
    ],
    "scalar-operand": [
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), ADD, None),
        lambda b: b.isa.affine_select(b.tile(), [[1, 64]], 0, b.tile(), b.tile(128, 1)),
    ],
    "second-operand": [
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), ADD, 1.0, op1=ADD),
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), ADD, 1.0, operand1=1.0),
    ],
    "mixed-operators": [
        lambda b: b.isa.tensor_scalar(
            b.tile(4, 4, "int32"), b.tile(4, 4, "int32"), OPS["bitwise_and"], 1, op1=ADD, operand1=1.0
        )
    ],
    "trn3-only": [
        lambda b: b.isa.activate2(b.tile(), EXP, b.tile()),
        lambda b: b.isa.exponential(b.tile(), b.tile()),
        lambda b: b.tile().indirect(b.tile()),
    ],
    "matmul-inputs-sbuf": [lambda b: _mm(b, moving=b.psum())],
    "matmul-output-psum": [lambda b: _mm(b, dst=b.fresh(64, 64))],
    "matmul-output-float32": [lambda b: _mm(b, dst=b.fresh(64, 64, dtype="bfloat16", buffer="psum"))],
    "matmul-dtypes": [lambda b: _mm(b, moving=b.tile(dtype="int32"))],
    "matmul-dtype-pair": [lambda b: _mm(b, moving=b.tile(dtype="bfloat16"))],
    "matmul-contraction": [lambda b: _mm(b, moving=b.tile(64))],
    "matmul-same-quadrant": [lambda b: _mm(b, stationary=b.tile()[0:32], moving=b.tile()[32:64])],
    "matmul-stationary": [lambda b: _mm(b, stationary=b.tile(128, 129))],
    "matmul-moving": [_too_wide_matmul],
    "matmul-output-shape": [lambda b: _mm(b, dst=b.fresh(64, 32, buffer="psum"))],
    "matmul-bank": [_across_banks],
    "matmul-tile": [
        lambda b: _mm(b, tile_position=(0, 0)),
        lambda b: _mm(b, tile_position=(0, 0), tile_size=(48, 128)),
        lambda b: _mm(b, tile_position=(0, 0), tile_size=(64, 128)),
        lambda b: _mm(b, tile_position=(16, 0), tile_size=(32, 128)),
    ],
    "accumulate-unwritten": [lambda b: _mm(b, accumulate=True)],
    "accumulate-foreign": [lambda b: _onto_memset(b, None), lambda b: _onto_memset(b, True)],
    "accumulate-mixed": [_unsettled],
    "double-row": [lambda b: _mm(b, perf_mode=b.isa.matmul_perf_mode.double_row)],
    "transpose-dtype": [
        lambda b: b.isa.nc_transpose(b.fresh(64, 128, buffer="psum"), b.tile(dtype="bfloat16")),
        lambda b: _mm(b, is_transpose=True, stationary=b.tile(dtype="bfloat16"), moving=b.tile(dtype="bfloat16")),
    ],
    "transpose-moving": [
        lambda b: b.isa.nc_matmul(b.fresh(64, 128, buffer="psum"), b.tile(), b.tile(128, 128), is_transpose=True)
    ],
    "transpose-size": [lambda b: b.isa.nc_transpose(b.fresh(33, 4), b.tile(4, 33), engine=b.isa.engine.vector)],
    "transpose-memory": [lambda b: b.isa.nc_transpose(b.fresh(64, 128), b.tile())],
    "transpose-shape": [lambda b: b.isa.nc_transpose(b.fresh(64, 64, buffer="psum"), b.tile())],
    "activation-function": [lambda b: b.isa.activation(b.tile(), ADD, b.tile())],
    "activation-range": [
        lambda b: b.isa.activation(b.tile(), OPS["log"], b.tile()),
        lambda b: b.isa.activation(b.tile(), OPS["rsqrt"], b.tile(), bias=-1.0),
        lambda b: b.isa.activation(b.tile(), OPS["reciprocal"], b.tile(), bias=1e-20),
    ],
    "activation-reduce-op": [
        lambda b: b.isa.activation(
            b.tile(), EXP, b.tile(), reduce_op=OPS["maximum"], reduce_cmd=b.isa.reduce_cmd.reset_reduce
        )
    ],
    "activation-copy-bias": [lambda b: b.isa.activation(b.tile(), COPY, b.tile(), bias=1.0)],
    "reduce-result-shape": [
        lambda b: b.isa.activation_reduce(b.tile(), EXP, b.tile(), ADD, b.tile(128, 2)),
        lambda b: b.isa.tensor_scalar_reduce(b.tile(), b.tile(), ADD, 1.0, ADD, b.tile(64, 1)),
    ],
    "reduce-command": [
        lambda b: b.isa.activation(b.tile(), EXP, b.tile(), reduce_res=b.tile(128, 1)),
        lambda b: b.isa.tensor_scalar_reduce(
            b.tile(), b.tile(), ADD, 1.0, ADD, reduce_cmd=b.isa.reduce_cmd.load_reduce
        ),
        lambda b: b.isa.tensor_scalar_cumulative(b.tile(), b.tile(), ADD, ADD, 0.0, reduce_cmd=b.isa.reduce_cmd.reduce),
        lambda b: b.isa.select_reduce(b.tile(), b.tile(dtype="uint8"), b.tile(), 0.0, reduce_res=b.tile(128, 1)),
    ],
    "scalar-engine-operators": [
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), OPS["maximum"], 0.0, engine=b.isa.engine.scalar)
    ],
    "gpsimd-tensor-scalar": [lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), ADD, 0.0, engine=b.isa.engine.gpsimd)],
    "power-engine": [
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.tile(), OPS["power"], engine=b.isa.engine.vector)
    ],
    "reduce-axes": [
        lambda b: b.isa.tensor_reduce(b.tile(128, 1), ADD, b.tile(), 0),
        lambda b: b.isa.tensor_reduce(b.tile(4, 8), ADD, b.tile(4, 64).reshape((4, 8, 8)), 1),
    ],
    "reduce-operator": [
        lambda b: b.isa.tensor_reduce(b.tile(128, 1), OPS["divide"], b.tile(), 1),
        lambda b: b.isa.tensor_scalar_reduce(b.tile(), b.tile(), ADD, 1.0, OPS["subtract"]),
    ],
    "cumulative-operators": [lambda b: b.isa.tensor_scalar_cumulative(b.tile(), b.tile(), ADD, OPS["divide"], 0.0)],
    "cumulative-dtype": [lambda b: b.isa.tensor_scalar_cumulative(b.tile(), b.tile(dtype="int32"), ADD, ADD, 0.0)],
    "scan-initial": [lambda b: b.isa.tensor_tensor_scan(b.tile(), b.tile(), b.tile(), b.tile(128, 2), MULTIPLY, ADD)],
    "copy-predicate": [lambda b: b.isa.tensor_copy_predicated(b.tile(), b.tile(), b.tile())],
    "copy-predicate-dtype": [
        lambda b: b.isa.tensor_copy_predicated(b.tile(dtype="bfloat16"), b.tile(), b.tile(dtype="uint8"))
    ],
    "select-predicate": [lambda b: b.isa.select_reduce(b.tile(), b.tile(), b.tile(), 0.0)],
    "select-dtype": [lambda b: b.isa.select_reduce(b.tile(), b.tile(dtype="uint8"), b.tile(dtype="int32"), 0.0)],
    "bn-stats-width": [lambda b: b.isa.bn_stats(b.tile(4, 6), b.tile(4, 513))],
    "bn-aggr-width": [lambda b: b.isa.bn_aggr(b.tile(4, 2), b.tile(4, 7))],
    "shuffle-mask": [
        lambda b: b.isa.nc_stream_shuffle(b.tile(), b.tile(), [0] * 31),
        lambda b: b.isa.nc_stream_shuffle(b.tile(), b.tile(), [32] * 32),
    ],
    "shuffle-dtype": [lambda b: b.isa.nc_stream_shuffle(b.tile(), b.tile(dtype="int32"), [0] * 32)],
    "max8-width": [lambda b: b.isa.max8(b.tile(4, 8), b.tile(4, 7)), lambda b: b.isa.max8(b.tile(4, 7), b.tile(4, 9))],
    "find8-index": [lambda b: b.isa.nc_find_index8(b.tile(4, 8), b.tile(4, 16), b.tile(4, 8))],
    "memset-type": [lambda b: b.isa.memset(b.tile(dtype="int32"), 0.5), lambda b: b.isa.memset(b.tile(), "0")],
    "memset-engine": [lambda b: b.isa.memset(b.tile(), 0.0, engine=b.isa.engine.scalar)],
    "pattern-dims": [lambda b: b.isa.iota(b.tile(dtype="int32"), [[1, 1]] * 5)],
    "pattern-elements": [lambda b: b.isa.iota(b.tile(dtype="int32"), [[1, 63]])],
    "gpsimd-sbuf": [
        lambda b: b.isa.iota(b.psum(), [[1, 64]]),
        lambda b: b.isa.affine_select(b.tile(), [[1, 64]], 0, b.psum(), 0.0),
    ],
    "affine-comparison": [lambda b: b.isa.affine_select(b.tile(), [[1, 64]], 0, b.tile(), 0.0, cmp_op=ADD)],
    "partition-reduce-operator": [lambda b: b.isa.tensor_partition_reduce(b.tile(1), MULTIPLY, b.tile())],
    "dma-psum": [lambda b: b.isa.dma_copy(b.tile(), b.psum())],
    "dma-elements": [lambda b: b.isa.dma_copy(b.tile(4, 4), b.hbm(4, 5))],
    "dma-shape": [lambda b: b.isa.dma_copy(b.tile(4, 4), b.hbm(2, 8))],
    "dma-hwdge-dtype": [lambda b: b.isa.dma_copy(b.tile(4, 4, "bfloat16"), b.hbm(4, 4), dge_mode=b.isa.dge_mode.hwdge)],
    "dma-hwdge-indirect": [
        lambda b: b.isa.dma_copy(b.tile(4), _rows(b), dge_mode=b.isa.dge_mode.hwdge),
        lambda b: b.isa.dma_transpose(b.tile(64, 4), _rows(b)),
    ],
    "dma-static-dynamic": [lambda b: b.isa.dma_copy(b.tile(4), _rows(b), dge_mode=b.isa.dge_mode.none)],
    "dma-engine": [
        lambda b: b.isa.dma_copy(b.tile(4, 4), b.hbm(4, 4), engine=b.isa.engine.sync),
        lambda b: b.isa.dma_copy(b.tile(4, 4), b.hbm(4, 4), dge_mode=b.isa.dge_mode.hwdge, engine=b.isa.engine.vector),
    ],
    "dma-priority": [lambda b: b.isa.dma_copy(b.tile(4, 4), b.hbm(4, 4), priority=1)],
    "dma-bounds": [
        lambda b: b.isa.dma_copy(b.tile(1, 4), b.hbm(4, 4).select(0, b.isa.register_alloc(4))),
        lambda b: b.isa.dma_copy(
            b.tile(4), b.hbm(16, 64).ap([[64, 4], [1, 64]], vector_offset=b.of([[0], [16], [1], [2]], "uint32"))
        ),
    ],
    "dma-transpose-axes": [lambda b: b.isa.dma_transpose(b.tile(4, 4), b.hbm(4, 4), axes=(0, 1))],
    "dma-transpose-dtype": [lambda b: b.isa.dma_transpose(b.tile(4, 4, "bfloat16"), b.hbm(4, 4))],
    "dma-transpose-shape": [lambda b: b.isa.dma_transpose(b.tile(4, 8), b.hbm(4, 8))],
    "dma-transpose-sbuf": [lambda b: b.isa.dma_transpose(b.hbm(8, 4), b.hbm(4, 8))],
    "dma-transpose-hwdge": [
        lambda b: b.isa.dma_transpose(b.tile(4, 8), b.hbm(8, 4), dge_mode=b.isa.dge_mode.hwdge),
        lambda b: b.isa.dma_transpose(b.tile(4, 16), b.hbm(16, 4), dge_mode=b.isa.dge_mode.hwdge),
    ],
}


def _as_on_chip(b: Any) -> Any:
    """A gather that claims to be on chip: only a hand-made view can be one."""
    rows = _rows(b)
    rows.storage.buffer = "sbuf"
    return rows


@pytest.mark.parametrize(
    ("rule", "case"),
    [pytest.param(rule, case, id=f"{rule}-{i}") for rule, cases in CASES.items() for i, case in enumerate(cases)],
)
def test_a_broken_rule_is_an_error_that_names_it(bench: Any, rule: str, case: Case) -> None:
    with pytest.raises(ConstraintViolation) as caught:
        case(bench)
    assert caught.value.rule == rule
    assert RULES[rule][1] in str(caught.value)


def test_an_instruction_outside_a_kernel_is_an_error() -> None:
    with pytest.raises(ConstraintViolation, match="inside-kernel"):
        namespace()["ndarray"]((4, 4), "float32")


def test_every_rule_has_a_case_and_a_source() -> None:
    assert set(CASES) | {"inside-kernel"} == set(RULES)
    assert all(statement and source for statement, source in RULES.values())


def test_an_unknown_keyword_is_an_error(bench: Any) -> None:
    with pytest.raises(TypeError):
        bench.isa.tensor_copy(bench.tile(), bench.tile(), mask=None)
    with pytest.raises(TypeError):
        bench.isa.nc_matmul(bench.psum(), bench.tile(), bench.tile(), precision="high")
