"""Owns the checks that all on-chip instructions share, and the values of their operands. Knows no instruction."""

from collections.abc import Callable
from typing import Any

import numpy as np

from warmstate.kernels.nki_sim.cost import Busy, latency_ns
from warmstate.kernels.nki_sim.dtypes import CODECS, Array
from warmstate.kernels.nki_sim.enums import engine
from warmstate.kernels.nki_sim.errors import ConstraintViolation, OutOfRange
from warmstate.kernels.nki_sim.operators import Operator
from warmstate.kernels.nki_sim.program import record
from warmstate.kernels.nki_sim.storage import PARTITIONS
from warmstate.kernels.nki_sim.tensor import NkiTensor
from warmstate.kernels.nki_sim.trace import Instruction, region

Scalar = float | int | NkiTensor

START_PARTITIONS = ((64, (0,)), (32, (0, 64)), (0, (0, 32, 64, 96)))
"""(more than this many partitions, the legal first partitions)."""


def check_tile(tensor: Any, role: str) -> NkiTensor:
    """An operand of a compute engine: on chip, adjacent partitions from a legal start, at most 4 free dimensions."""
    if not isinstance(tensor, NkiTensor) or not tensor.storage.is_on_chip:
        raise ConstraintViolation("on-chip-operand", f"{role} is {tensor!r}")
    if tensor.rows is not None:
        raise ConstraintViolation("static-operand", f"{role} is a gather of {tensor!r}")
    if tensor.dynamic is not None and not 0 <= tensor.dynamic.index < tensor.dynamic.bound:
        raise OutOfRange(f"{role}: dynamic index {tensor.dynamic.index} of {tensor.dynamic.bound}")
    partitions = tensor.shape[0]
    if partitions > PARTITIONS:
        raise ConstraintViolation("partition-limit", f"{role} has {partitions} partitions")
    row = tensor.row
    if partitions > 1 and tensor.strides[0] != row:
        raise ConstraintViolation("partition-stride", f"{role} steps {tensor.strides[0]} elements of rows of {row}")
    start = tensor.offset // row
    legal = next(starts for least, starts in START_PARTITIONS if partitions > least)
    if start not in legal:
        raise ConstraintViolation("start-partition", f"{role}: {partitions} partitions from {start}")
    if len(tensor.shape) > 5:
        raise ConstraintViolation("free-dims", f"{role} has {len(tensor.shape) - 1} free dimensions")
    return tensor


def check_same_shape(dst: NkiTensor, *others: NkiTensor) -> None:
    """The same partitions and as many elements in each."""
    for other in others:
        if other.shape[0] != dst.shape[0]:
            raise ConstraintViolation("same-partitions", f"{other!r} into {dst!r}")
        if other.num_free != dst.num_free:
            raise ConstraintViolation("same-elements", f"{other!r} into {dst!r}")


def check_not_both_psum(first: NkiTensor, second: NkiTensor) -> None:
    if first.buffer == "psum" and second.buffer == "psum":
        raise ConstraintViolation("both-psum", f"{first!r} and {second!r}")


def check_gpsimd(chosen: str, *tensors: NkiTensor) -> None:
    if chosen == "gpsimd" and any(tensor.buffer == "psum" for tensor in tensors):
        raise ConstraintViolation("gpsimd-psum", ", ".join(map(repr, tensors)))


def chosen_engine(asked: engine, default: str, allowed: tuple[str, ...]) -> str:
    name = default if asked is engine.unknown else asked.name
    if name not in allowed:
        raise ConstraintViolation("unknown-engine", f"engine {name}, allowed {allowed}")
    return name


def check_operator(op: Any, kinds: tuple[str, ...], role: str = "op") -> Operator:
    if not isinstance(op, Operator) or op.kind not in kinds:
        raise ConstraintViolation("known-operator", f"{role} is {op!r}")
    return op


def check_bitvec(*tensors: NkiTensor) -> None:
    if any(CODECS[tensor.dtype].is_float for tensor in tensors):
        raise ConstraintViolation("bitvec-integers", ", ".join(map(repr, tensors)))


def floats(tensor: NkiTensor, shape: tuple[int, ...]) -> Array:
    """The values as float32 in the shape of the output."""
    return tensor.read().astype(np.float32, copy=False).reshape(shape)


def vector_operand(operand: Any, data: NkiTensor, role: str, any_dtype: bool = False) -> Array | np.float32:
    """A number, or a (P, 1) tile ready to broadcast over the free dimensions of `data`."""
    if isinstance(operand, NkiTensor):
        check_tile(operand, role)
        if operand.shape[0] != data.shape[0] or operand.num_free != 1:
            raise ConstraintViolation("vector-operand-shape", f"{role} {operand!r} for {data!r}")
        if operand.dtype != "float32" and not any_dtype:
            raise ConstraintViolation("vector-operand-float32", f"{role} {operand!r}")
        return operand.read().astype(np.float32).reshape((-1,) + (1,) * (len(data.shape) - 1))
    if isinstance(operand, bool) or not isinstance(operand, (int, float, np.floating, np.integer)):
        raise ConstraintViolation("scalar-operand", f"{role} is {operand!r}")
    return np.float32(operand)


def apply(function: Callable[..., Array], *arguments: Any) -> Array:
    """IEEE arithmetic: overflow and invalid give inf and NaN, as on the device."""
    with np.errstate(all="ignore"):
        return function(*arguments)


def issue(
    name: str, operation: str, busy: Busy, inputs: tuple[Any, ...], outputs: tuple[NkiTensor | None, ...]
) -> None:
    """Records one compute instruction; inputs that are numbers are left out."""
    read = tuple(tensor for tensor in inputs if isinstance(tensor, NkiTensor))
    written = tuple(tensor for tensor in outputs if tensor is not None)
    instruction = Instruction(
        name, operation, busy, latency_ns(name), tuple(map(region, read)), tuple(map(region, written))
    )
    record(instruction, *read, *written)


def write(dst: NkiTensor, values: Array) -> None:
    """Writes the result of an engine that is not the tensor engine."""
    dst.write(values)
    if dst.storage.by_matmul is not None:
        dst.matmul_mask()[...] = False
