"""Every constraint of the simulator is broken here, and is found: at least one case for each rule.

One table, longer than a file should be, so that a rule without a case is seen.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from warmstate.kernels.nki_sim.rules import RULES

Case = Callable[[Any], Any]

OURS_ALONE = (
    "psum-size",
    "sbuf-size",
    "capacity",
    "accumulate-unwritten",
    "accumulate-foreign",
    "accumulate-mixed",
    "activation-range",
    "activation-copy-bias",
    "output-written",
    "language-broadcast",
    "language-operator",
)
"""Rules of the device that AWS's simulator is documented not to check, or only to warn of; untried there."""

INTERNAL = ("inside-kernel", "static-operand")
"""Rules that no kernel can break: `nki_sim/test_nki_internals.py` has them."""


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


def _partly_written(b: Any) -> Any:
    out = b.fresh(4, 4, buffer="shared_hbm")
    b.nl.store(out[0:2], b.tile(2, 4))
    return out


def _diverging(b: Any) -> Any:
    out = b.fresh(4, 4 + b.nl.program_id(0), buffer="shared_hbm")
    b.nl.store(out, b.tile(*out.shape))
    return out


def _alone(b: Any) -> Any:
    return [b.fresh(4, 4, buffer="shared_hbm") for _ in range(b.nl.program_id(0))]


def _overfull(b: Any) -> None:
    tiles = [b.tile(2, 30 * 1024) for _ in range(3)]
    b.isa.tensor_copy(tiles[0], tiles[1])
    b.isa.tensor_copy(tiles[1], tiles[2])


def _tensor_scalar(b: Any, **changed: Any) -> None:
    b.isa.tensor_scalar(b.tile(), b.tile(), **({"op0": b.nl.add, "operand0": 1.0} | changed))


LAUNCHES: dict[str, list[tuple[Case, int]]] = {
    "output-written": [(_partly_written, 1)],
    "output-shared-hbm": [(lambda b: b.tile(4, 4), 1), (lambda b: b.fresh(4, 4, buffer="hbm"), 1)],
    "lnc-count": [(_partly_written, 3)],
    "same-control-flow": [(_diverging, 2), (_alone, 2)],
    "capacity": [(_overfull, 1)],
}
"""Whole kernels, and on how many cores they are launched."""

CASES: dict[str, list[Case]] = {
    "on-chip-rank": [lambda b: b.fresh(128)],
    "positive-shape": [lambda b: b.fresh(4, 0), lambda b: b.fresh()],
    "known-buffer": [lambda b: b.nl.ndarray((4, 4), b.nl.float32, "dram")],
    "known-dtype": [lambda b: b.nl.ndarray((4, 4), "float64")],
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
    "broadcast-rank": [lambda b: b.nl.broadcast_to(b.tile(4, 1), (4, 2, 3))],
    "language-broadcast": [lambda b: b.nl.add(b.tile(4, 8), b.tile(4, 1))],
    "language-operator": [
        lambda b: b.nl.divide(b.tile(4, 8), b.tile(4, 8)),
        lambda b: b.nl.power(b.tile(4, 8), 2.0),
        lambda b: b.nl.matmul(b.tile(4, 8), b.tile(8, 8)),
    ],
    "squeeze-size-1": [lambda b: b.tile().squeeze_dim(1)],
    "view-dtype": [
        lambda b: b.tile(4, 3, "bfloat16").view(b.nl.float32),
        lambda b: b.tile()[:, 0:64:2].view(b.nl.int32),
    ],
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
    "register-value": [
        lambda b: b.hbm(4, 4).select(0, b.isa.register_alloc()),
        lambda b: b.isa.register_alloc(1.5),
        lambda b: b.isa.register_load(b.isa.register_alloc(), b.tile(1, 1)),
    ],
    "loop-step": [lambda b: b.nl.fori_loop(0, 4, print, step=0)],
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
        lambda b: b.isa.tensor_tensor(b.tile(64), b.tile(64), b.tile(32), b.nl.add),
        lambda b: b.isa.max8(b.tile(4, 8), b.tile(8, 16)),
        lambda b: b.isa.tensor_reduce(b.tile(8, 1), b.nl.add, b.tile(4, 8), 1),
    ],
    "same-elements": [
        lambda b: b.isa.tensor_copy(b.tile(4, 8), b.tile(4, 9)),
        lambda b: b.isa.tensor_reduce(b.tile(4, 2), b.nl.add, b.tile(4, 8), 1),
    ],
    "both-psum": [
        lambda b: b.isa.tensor_tensor(b.tile(), b.psum(), b.psum(), b.nl.add),
        lambda b: b.isa.scalar_tensor_tensor(b.tile(), b.psum(), b.nl.add, 1.0, b.nl.add, b.psum()),
        lambda b: b.isa.tensor_tensor_scan(b.tile(), b.psum(), b.psum(), 0.0, b.nl.multiply, b.nl.add),
    ],
    "gpsimd-psum": [
        lambda b: b.isa.tensor_copy(b.tile(), b.psum(), engine=b.isa.engine.gpsimd),
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.psum(), b.nl.power),
        lambda b: b.isa.memset(b.psum(), 0.0, engine=b.isa.engine.gpsimd),
    ],
    "unknown-engine": [
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.tile(), b.nl.add, engine=b.isa.engine.scalar),
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), b.nl.rsqrt, engine=b.isa.engine.vector),
    ],
    "bitvec-integers": [
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.tile(), b.nl.bitwise_and),
        lambda b: b.isa.tensor_scalar(b.tile(4, 4, "int32"), b.tile(4, 4, "int32"), b.nl.left_shift, 1.5),
    ],
    "known-operator": [
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.tile(), b.nl.exp),
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.tile(), np.add),
        lambda b: b.isa.scalar_tensor_tensor(b.tile(), b.tile(), b.nl.bitwise_or, 1.0, b.nl.add, b.tile()),
    ],
    "vector-operand-shape": [lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), b.nl.add, b.tile(128, 2))],
    "vector-operand-float32": [
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), b.nl.add, b.tile(128, 1, "bfloat16")),
        lambda b: b.isa.activation(b.tile(), b.nl.exp, b.tile(), scale=b.tile(128, 1, "bfloat16")),
    ],
    "scalar-operand": [
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), b.nl.add, None),
        lambda b: b.isa.affine_select(b.tile(), [[1, 64]], 0, b.tile(), b.tile(128, 1)),
    ],
    "second-operand": [
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), b.nl.add, 1.0, op1=b.nl.add),
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), b.nl.add, 1.0, operand1=1.0),
    ],
    "mixed-operators": [
        lambda b: b.isa.tensor_scalar(
            b.tile(4, 4, "int32"), b.tile(4, 4, "int32"), b.nl.bitwise_and, 1, op1=b.nl.add, operand1=1.0
        )
    ],
    "trn3-only": [
        lambda b: b.isa.activate2(b.tile(), b.nl.exp, b.tile()),
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
    "activation-function": [lambda b: b.isa.activation(b.tile(), b.nl.add, b.tile())],
    "activation-range": [
        lambda b: b.isa.activation(b.tile(), b.nl.log, b.tile()),
        lambda b: b.isa.activation(b.tile(), b.nl.rsqrt, b.tile(), bias=-1.0),
        lambda b: b.isa.activation(b.tile(), b.nl.reciprocal, b.tile(), bias=1e-20),
    ],
    "activation-reduce-op": [
        lambda b: b.isa.activation(
            b.tile(), b.nl.exp, b.tile(), reduce_op=b.nl.maximum, reduce_cmd=b.isa.reduce_cmd.reset_reduce
        )
    ],
    "activation-copy-bias": [lambda b: b.isa.activation(b.tile(), b.nl.copy, b.tile(), bias=1.0)],
    "reduce-result-shape": [
        lambda b: b.isa.activation_reduce(b.tile(), b.nl.exp, b.tile(), b.nl.add, b.tile(128, 2)),
        lambda b: b.isa.tensor_scalar_reduce(b.tile(), b.tile(), b.nl.add, 1.0, b.nl.add, b.tile(64, 1)),
    ],
    "reduce-command": [
        lambda b: b.isa.activation(b.tile(), b.nl.exp, b.tile(), reduce_res=b.tile(128, 1)),
        lambda b: b.isa.tensor_scalar_reduce(
            b.tile(), b.tile(), b.nl.add, 1.0, b.nl.add, reduce_cmd=b.isa.reduce_cmd.load_reduce
        ),
        lambda b: b.isa.tensor_scalar_cumulative(
            b.tile(), b.tile(), b.nl.add, b.nl.add, 0.0, reduce_cmd=b.isa.reduce_cmd.reduce
        ),
        lambda b: b.isa.select_reduce(b.tile(), b.tile(dtype="uint8"), b.tile(), 0.0, reduce_res=b.tile(128, 1)),
    ],
    "scalar-engine-operators": [
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), b.nl.maximum, 0.0, engine=b.isa.engine.scalar)
    ],
    "gpsimd-tensor-scalar": [
        lambda b: b.isa.tensor_scalar(b.tile(), b.tile(), b.nl.add, 0.0, engine=b.isa.engine.gpsimd)
    ],
    "power-engine": [
        lambda b: b.isa.tensor_tensor(b.tile(), b.tile(), b.tile(), b.nl.power, engine=b.isa.engine.vector)
    ],
    "reduce-axes": [
        lambda b: b.isa.tensor_reduce(b.tile(128, 1), b.nl.add, b.tile(), 0),
        lambda b: b.isa.tensor_reduce(b.tile(4, 8), b.nl.add, b.tile(4, 64).reshape((4, 8, 8)), 1),
    ],
    "reduce-operator": [
        lambda b: b.isa.tensor_reduce(b.tile(128, 1), b.nl.divide, b.tile(), 1),
        lambda b: b.isa.tensor_scalar_reduce(b.tile(), b.tile(), b.nl.add, 1.0, b.nl.subtract),
    ],
    "cumulative-operators": [lambda b: b.isa.tensor_scalar_cumulative(b.tile(), b.tile(), b.nl.add, b.nl.divide, 0.0)],
    "cumulative-dtype": [
        lambda b: b.isa.tensor_scalar_cumulative(b.tile(), b.tile(dtype="int32"), b.nl.add, b.nl.add, 0.0)
    ],
    "scan-initial": [
        lambda b: b.isa.tensor_tensor_scan(b.tile(), b.tile(), b.tile(), b.tile(128, 2), b.nl.multiply, b.nl.add)
    ],
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
    "affine-comparison": [lambda b: b.isa.affine_select(b.tile(), [[1, 64]], 0, b.tile(), 0.0, cmp_op=b.nl.add)],
    "partition-reduce-operator": [lambda b: b.isa.tensor_partition_reduce(b.tile(1), b.nl.multiply, b.tile())],
    "dma-psum": [lambda b: b.isa.dma_copy(b.tile(), b.psum())],
    "dma-elements": [lambda b: b.isa.dma_copy(b.tile(4, 4), b.hbm(4, 5))],
    "dma-shape": [lambda b: b.isa.dma_copy(b.tile(2, 128), _rows(b))],
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


def _check(bench: Any, rule: str, run: Callable[[], Any]) -> None:
    if bench.is_real and rule in OURS_ALONE:
        pytest.skip(f"AWS's simulator is documented not to check {rule}")
    with pytest.raises(bench.refusal) as caught:
        run()
    if not bench.is_real:
        assert vars(caught.value)["rule"] == rule
        assert RULES[rule][1] in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "case"),
    [pytest.param(rule, case, id=f"{rule}-{i}") for rule, cases in CASES.items() for i, case in enumerate(cases)],
)
def test_a_broken_rule_is_an_error_that_names_it(bench: Any, rule: str, case: Case) -> None:
    def body() -> None:
        case(bench)

    _check(bench, rule, lambda: bench.run(body))


@pytest.mark.parametrize(
    ("rule", "case", "cores"),
    [pytest.param(rule, *case, id=f"{rule}-{i}") for rule, cases in LAUNCHES.items() for i, case in enumerate(cases)],
)
def test_a_kernel_that_breaks_a_rule_as_a_whole_is_an_error(bench: Any, rule: str, case: Case, cores: int) -> None:
    _check(bench, rule, lambda: bench.launch(lambda _x: case(bench), cores=cores))


def test_every_rule_has_a_case_and_a_source() -> None:
    assert {*CASES, *LAUNCHES, *INTERNAL} == set(RULES)
    assert {*OURS_ALONE} <= set(RULES)
    assert all(statement and source for statement, source in RULES.values())
    assert sum(map(len, CASES.values())) + sum(map(len, LAUNCHES.values())) > 150


def test_an_unknown_keyword_is_an_error(bench: Any) -> None:
    with pytest.raises(TypeError):
        bench.run(lambda: bench.isa.tensor_copy(bench.tile(), bench.tile(), mask=None))
    with pytest.raises(TypeError):
        bench.run(lambda: bench.isa.nc_matmul(bench.psum(), bench.tile(), bench.tile(), precision="high"))
