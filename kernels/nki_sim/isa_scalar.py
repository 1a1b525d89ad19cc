"""The scalar engine: activation and activation_reduce. ISA activation, activation_reduce; SHARED nki-act-func."""

from typing import Any

import numpy as np

from warmstate.kernels.nki_sim import cost
from warmstate.kernels.nki_sim.cost_constants import READ_ACCUMULATOR_CYCLES
from warmstate.kernels.nki_sim.dtypes import Array
from warmstate.kernels.nki_sim.enums import reduce_cmd
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.operands import (
    Scalar,
    apply,
    check_same_shape,
    check_tile,
    floats,
    issue,
    vector_operand,
    write,
)
from warmstate.kernels.nki_sim.operators import SIGNED_RANGE, Operator
from warmstate.kernels.nki_sim.program import current
from warmstate.kernels.nki_sim.tensor import NkiTensor


def activation(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    bias: Scalar | None = None,
    scale: Scalar = 1.0,
    reduce_op: Operator | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: str | None = None,
) -> None:
    """dst = op(data * scale + bias); optionally its sum over the free dimensions."""
    check_tile(dst, "dst")
    check_tile(data, "data")
    check_same_shape(dst, data)
    _check_function(op, bias)
    values = apply(np.multiply, floats(data, data.shape), vector_operand(scale, data, "scale"))
    if bias is not None:
        values = apply(np.add, values, vector_operand(bias, data, "bias", any_dtype=True))
    _check_range(op, values)
    assert op.activation is not None
    values = apply(op.activation, values).astype(np.float32, copy=False)
    _reduce(values, data, reduce_op, reduce_res, reduce_cmd)
    write(dst, values.reshape(dst.shape))
    extra = READ_ACCUMULATOR_CYCLES if reduce_res is not None else 0
    busy = cost.one_input("scalar", data.num_free, extra)
    issue("scalar", f"activation({op.name})", busy, (data, bias, scale), (dst, reduce_res))


def activation_reduce(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    reduce_op: Operator,
    reduce_res: NkiTensor,
    bias: Scalar | None = None,
    scale: Scalar = 1.0,
    name: str | None = None,
) -> None:
    """activation with reset_reduce."""
    activation(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce)


def activate2(*_arguments: Any, **_keywords: Any) -> None:
    raise ConstraintViolation("trn3-only", "activate2")


def exponential(*_arguments: Any, **_keywords: Any) -> None:
    raise ConstraintViolation("trn3-only", "exponential")


def _check_function(op: Any, bias: Scalar | None) -> None:
    if not isinstance(op, Operator) or op.activation is None:
        raise ConstraintViolation("activation-function", f"op is {op!r}")
    if op.name == "copy" and bias is not None and not (isinstance(bias, (int, float)) and bias == 0):
        raise ConstraintViolation("activation-copy-bias", "activation(op=nl.copy, bias=...)")


def _check_range(op: Operator, values: Array) -> None:
    if op.valid is None:
        return
    low, high = op.valid
    bounded = np.abs(values) if op.name in SIGNED_RANGE else values
    if not np.all((bounded >= low) & (bounded <= high)):
        worst = bounded.reshape(-1)[np.argmax(~((bounded >= low) & (bounded <= high)))]
        raise ConstraintViolation("activation-range", f"{op!r} of {worst}, valid from {low} to {high}")


def _reduce(
    values: Array, data: NkiTensor, reduce_op: Operator | None, reduce_res: NkiTensor | None, command: reduce_cmd
) -> None:
    if command is reduce_cmd.load_reduce:
        raise ConstraintViolation("reduce-command", f"activation with {command}")
    if reduce_op is None and reduce_res is None and command is reduce_cmd.idle:
        return
    if command in (reduce_cmd.reduce, reduce_cmd.reset_reduce) and (reduce_op is None or reduce_op.name != "add"):
        raise ConstraintViolation("activation-reduce-op", f"reduce_op is {reduce_op!r}")
    sums = values.reshape(data.shape[0], -1).sum(axis=1, dtype=np.float32, keepdims=True)
    accumulators = current().accumulators
    if command in (reduce_cmd.reset, reduce_cmd.reset_reduce):
        accumulators["scalar"] = np.zeros_like(sums)
    if command in (reduce_cmd.reduce, reduce_cmd.reset_reduce):
        accumulators["scalar"] = apply(np.add, accumulators["scalar"], sums)
    if reduce_res is None:
        return
    check_tile(reduce_res, "reduce_res")
    if reduce_res.shape[0] != data.shape[0] or reduce_res.num_free != 1:
        raise ConstraintViolation("reduce-result-shape", f"{reduce_res!r} for {data!r}")
    if "scalar" not in accumulators or accumulators["scalar"].shape != sums.shape:
        raise ConstraintViolation("reduce-command", "reduce_res without a reduction")
    write(reduce_res, accumulators["scalar"].reshape(reduce_res.shape))
