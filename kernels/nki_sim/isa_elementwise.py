"""Element by element on the vector engine and its stand-ins: copies, memset, arithmetic with scalars and tiles. ISA."""

from typing import Any

import numpy as np

from warmstate.kernels.nki_sim import cost
from warmstate.kernels.nki_sim.cost_constants import GPSIMD_RSQRT_FACTOR, VECTOR_RECIPROCAL_FACTOR
from warmstate.kernels.nki_sim.dtypes import CODECS, Array
from warmstate.kernels.nki_sim.enums import engine
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.operands import (
    Scalar,
    apply,
    check_bitvec,
    check_gpsimd,
    check_not_both_psum,
    check_operator,
    check_same_shape,
    check_tile,
    chosen_engine,
    floats,
    issue,
    vector_operand,
    write,
)
from warmstate.kernels.nki_sim.operators import Operator
from warmstate.kernels.nki_sim.tensor import NkiTensor

TENSOR_KINDS = ("arithmetic", "bitvec")
SCALAR_KINDS = ("arithmetic", "bitvec", "unary")
SCALAR_ENGINE_OPERATORS = (("multiply", "add"), ("multiply", None), ("add", None))
INTEGERS_32 = ("int32", "uint32")


def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: engine = engine.unknown, name: str | None = None) -> None:
    """dst = src: bit by bit between equal dtypes, through float32 otherwise."""
    check_tile(dst, "dst")
    check_tile(src, "src")
    check_same_shape(dst, src)
    chosen = chosen_engine(engine, "vector", ("vector", "scalar", "gpsimd"))
    check_gpsimd(chosen, dst, src)
    write(dst, src.read() if src.dtype == dst.dtype else floats(src, src.shape))
    issue(chosen, "tensor_copy", cost.copy_like(chosen, dst, src), (src,), (dst,))


def memset(dst: NkiTensor, value: Any, engine: engine = engine.unknown, name: str | None = None) -> None:
    """dst = value, whose type must fit the dtype."""
    check_tile(dst, "dst")
    if engine.name not in ("unknown", "vector", "gpsimd"):
        raise ConstraintViolation("memset-engine", f"engine {engine.name}")
    chosen = chosen_engine(engine, "gpsimd" if dst.buffer == "sbuf" else "vector", ("vector", "gpsimd"))
    check_gpsimd(chosen, dst)
    is_float = CODECS[dst.dtype].is_float
    integral = isinstance(value, (int, np.integer)) or (isinstance(value, float) and value.is_integer())
    if not isinstance(value, (int, float, np.integer, np.floating)) or (not is_float and not integral):
        raise ConstraintViolation("memset-type", f"{value!r} into {dst!r}")
    write(dst, np.full(dst.shape, value, dtype=np.float32 if is_float else np.int64))
    issue(chosen, "memset", cost.one_input(chosen, dst.num_free), (), (dst,))


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Operator,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> None:
    """dst = data1 op data2."""
    for tensor, role in ((dst, "dst"), (data1, "data1"), (data2, "data2")):
        check_tile(tensor, role)
    check_same_shape(dst, data1, data2)
    check_not_both_psum(data1, data2)
    check_operator(op, TENSOR_KINDS)
    chosen = chosen_engine(engine, _tensor_engine(op, dst, data1, data2), ("vector", "gpsimd"))
    if op.name == "power" and chosen != "gpsimd":
        raise ConstraintViolation("power-engine", f"power on {chosen}")
    check_gpsimd(chosen, dst, data1, data2)
    integers = all(t.dtype in INTEGERS_32 for t in (dst, data1, data2)) and chosen == "gpsimd"
    if op.kind == "bitvec":
        check_bitvec(dst, data1, data2)
    assert op.function is not None
    if op.kind == "bitvec" or integers:
        values = apply(op.function, data1.read().reshape(dst.shape), data2.read().reshape(dst.shape))
    else:
        values = apply(op.function, floats(data1, dst.shape), floats(data2, dst.shape))
    write(dst, values)
    issue(chosen, f"tensor_tensor({op.name})", cost.tensor_tensor(chosen, dst, data1, data2), (data1, data2), (dst,))


def _tensor_engine(op: Operator, *tensors: NkiTensor) -> str:
    if op.name == "power":
        return "gpsimd"
    integers = all(tensor.dtype in INTEGERS_32 for tensor in tensors)
    return "gpsimd" if integers and all(tensor.buffer == "sbuf" for tensor in tensors) else "vector"


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: Scalar | None = None,
    reverse0: bool = False,
    op1: Operator | None = None,
    operand1: Scalar | None = None,
    reverse1: bool = False,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1; operands are numbers or float32 (P, 1)."""
    check_tile(dst, "dst")
    check_tile(data, "data")
    check_same_shape(dst, data)
    _check_operators(op0, op1, operand1)
    default = "gpsimd" if op0.name == "rsqrt" else "vector"
    chosen = chosen_engine(engine, default, ("vector", "scalar", "gpsimd"))
    _check_scalar_engine(chosen, op0, op1)
    check_gpsimd(chosen, dst, data)
    if op0.kind == "bitvec":
        check_bitvec(dst, data)
        values = _bitvec(data, op0, operand0, reverse0)
        values = values if op1 is None else _step(values, op1, operand1, reverse1)
    else:
        values = _step(floats(data, dst.shape), op0, _operand(op0, operand0, dst, data), reverse0)
        if op1 is not None:
            values = _step(values, op1, _operand(op1, operand1, dst, data), reverse1)
    write(dst, values.reshape(dst.shape))
    busy = cost.copy_like(chosen, dst, data)
    if chosen == "gpsimd":
        busy = cost.one_input(chosen, GPSIMD_RSQRT_FACTOR * data.num_free)
    issue(chosen, f"tensor_scalar({op0.name})", busy, (data, operand0, operand1), (dst,))


def _operand(op: Operator, operand: Scalar | None, dst: NkiTensor, data: NkiTensor) -> Any:
    if op.kind == "unary":
        if operand not in (None, 0, 0.0):
            raise ConstraintViolation("scalar-operand", f"{op!r} is unary, its operand {operand!r}")
        return None
    value = vector_operand(operand, data, "operand")
    return value if np.ndim(value) == 0 else np.asarray(value).reshape((-1,) + (1,) * (dst.ndim - 1))


def _check_operators(op0: Any, op1: Any, operand1: Scalar | None) -> None:
    check_operator(op0, SCALAR_KINDS, "op0")
    if op1 is None and operand1 is not None:
        raise ConstraintViolation("second-operand", "operand1 without op1")
    if op1 is None:
        return
    check_operator(op1, SCALAR_KINDS, "op1")
    if operand1 is None and op1.kind != "unary":
        raise ConstraintViolation("second-operand", "op1 without operand1")
    if (op0.kind == "bitvec") != (op1.kind == "bitvec"):
        raise ConstraintViolation("mixed-operators", f"{op0!r} with {op1!r}")


def _check_scalar_engine(chosen: str, op0: Operator, op1: Operator | None) -> None:
    names = (op0.name, None if op1 is None else op1.name)
    if chosen == "scalar" and names not in SCALAR_ENGINE_OPERATORS:
        raise ConstraintViolation("scalar-engine-operators", f"{names}")
    if chosen == "gpsimd" and op0.name != "rsqrt":
        raise ConstraintViolation("gpsimd-tensor-scalar", f"{names}")
    if chosen != "gpsimd" and op0.name == "rsqrt":
        raise ConstraintViolation("unknown-engine", f"rsqrt on {chosen}")


def _bitvec(data: NkiTensor, op: Operator, operand: Any, reverse: bool) -> Array:
    values = data.read()
    if isinstance(operand, NkiTensor):
        check_bitvec(operand)
        operand = operand.read().reshape((-1,) + (1,) * (data.ndim - 1))
    elif isinstance(operand, bool) or not isinstance(operand, (int, np.integer)):
        raise ConstraintViolation("bitvec-integers", f"operand {operand!r}")
    return _step(values, op, np.asarray(operand).astype(values.dtype), reverse)


def _step(values: Array, op: Operator, operand: Any, reverse: bool) -> Array:
    assert op.function is not None
    if op.kind == "unary":
        return apply(op.function, values)
    return apply(op.function, operand, values) if reverse else apply(op.function, values, operand)


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: Scalar,
    op1: Operator,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1, operand1 a tile like data."""
    for tensor, role in ((dst, "dst"), (data, "data"), (operand1, "operand1")):
        check_tile(tensor, role)
    check_same_shape(dst, data, operand1)
    check_not_both_psum(data, operand1)
    check_operator(op0, ("arithmetic",), "op0")
    check_operator(op1, ("arithmetic",), "op1")
    values = _step(floats(data, dst.shape), op0, _operand(op0, operand0, dst, data), reverse0)
    write(dst, _step(values, op1, floats(operand1, dst.shape), reverse1))
    busy = cost.two_inputs("vector", data.num_free)
    issue("vector", f"scalar_tensor_tensor({op0.name}, {op1.name})", busy, (data, operand0, operand1), (dst,))


def tensor_copy_predicated(
    dst: NkiTensor, src: Scalar, predicate: NkiTensor, reverse_pred: bool = False, name: str | None = None
) -> None:
    """dst = src where the predicate is not 0 (is 0, reversed); the rest of dst stays."""
    check_tile(dst, "dst")
    check_tile(predicate, "predicate")
    check_same_shape(dst, predicate)
    if predicate.dtype not in ("uint8", "uint16", "uint32"):
        raise ConstraintViolation("copy-predicate", f"{predicate!r}")
    chosen = (predicate.read().reshape(dst.shape) != 0) != reverse_pred
    if isinstance(src, NkiTensor):
        check_tile(src, "src")
        check_same_shape(dst, src)
        check_not_both_psum(src, predicate)
        if src.dtype != dst.dtype:
            raise ConstraintViolation("copy-predicate-dtype", f"{src!r} into {dst!r}")
        values = src.read().reshape(dst.shape)
    else:
        values = np.broadcast_to(vector_operand(src, dst, "src"), dst.shape)
    raw = dst.raw()
    np.copyto(raw, CODECS[dst.dtype].encode(np.ascontiguousarray(values)).reshape(dst.shape), where=chosen)
    written = dst.written()
    written |= chosen
    if dst.storage.by_matmul is not None:
        dst.matmul_mask()[...] = False
    busy = cost.two_inputs("vector", dst.num_free)
    issue("vector", "tensor_copy_predicated", busy, (src, predicate, dst), (dst,))


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """dst = 1 / data."""
    check_tile(dst, "dst")
    check_tile(data, "data")
    check_same_shape(dst, data)
    write(dst, apply(np.divide, np.float32(1), floats(data, dst.shape)))
    busy = cost.one_input("vector", VECTOR_RECIPROCAL_FACTOR * data.num_free)
    issue("vector", "reciprocal", busy, (data,), (dst,))
