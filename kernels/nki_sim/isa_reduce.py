"""Reductions, scans, selections and searches on the vector engine. ISA, the same names."""

import numpy as np

from warmstate.kernels.nki_sim import cost
from warmstate.kernels.nki_sim.cost_constants import READ_ACCUMULATOR_CYCLES
from warmstate.kernels.nki_sim.dtypes import CODECS, Array
from warmstate.kernels.nki_sim.enums import reduce_cmd
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.operands import (
    Scalar,
    apply,
    check_bitvec,
    check_not_both_psum,
    check_operator,
    check_same_shape,
    check_tile,
    floats,
    issue,
    vector_operand,
    write,
)
from warmstate.kernels.nki_sim.operators import CUMULATIVE, OPERATORS, Operator
from warmstate.kernels.nki_sim.program import current
from warmstate.kernels.nki_sim.tensor import NkiTensor

QUADRANT = 32
KEEP = 255
BN_STATS_WIDTH = 512


def tensor_reduce(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    axis: int | tuple[int, ...] | list[int],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """dst = the reduction of data over its last free dimensions."""
    check_tile(dst, "dst")
    check_tile(data, "data")
    check_operator(op, ("arithmetic", "bitvec"))
    if op.accumulate is None:
        raise ConstraintViolation("reduce-operator", f"op is {op!r}")
    axes = tuple(sorted(a % data.ndim for a in ((axis,) if isinstance(axis, int) else tuple(axis))))
    if not axes or axes != tuple(range(data.ndim - len(axes), data.ndim)) or axes[0] == 0:
        raise ConstraintViolation("reduce-axes", f"axis {axis} of {data!r}")
    if op.kind == "bitvec":
        check_bitvec(dst, data)
    values = data.read() if op.kind == "bitvec" else floats(data, data.shape)
    flat = values.reshape((*data.shape[: axes[0]], -1))
    reduced = apply(lambda x: op.accumulate.reduce(x, axis=-1), flat)
    if dst.shape[0] != data.shape[0]:
        raise ConstraintViolation("same-partitions", f"{data!r} into {dst!r}")
    if reduced.size != dst.size:
        raise ConstraintViolation("same-elements", f"{data!r} over {axes} into {dst!r}")
    write(dst, (-reduced if negate else reduced).reshape(dst.shape))
    issue("vector", f"tensor_reduce({op.name})", cost.one_input("vector", data.num_free), (data,), (dst,))


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: Scalar,
    reduce_op: Operator,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_init: Scalar | None = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> None:
    """dst = data op0 operand0, and its reduction over the free dimensions."""
    check_tile(dst, "dst")
    check_tile(data, "data")
    check_same_shape(dst, data)
    check_operator(op0, ("arithmetic",), "op0")
    check_operator(reduce_op, ("arithmetic",), "reduce_op")
    if reduce_op.name not in ("add", "multiply", "maximum", "minimum"):
        raise ConstraintViolation("reduce-operator", f"reduce_op is {reduce_op!r}")
    operand = vector_operand(operand0, data, "operand0")
    assert op0.function is not None
    left, right = (operand, floats(data, data.shape)) if reverse0 else (floats(data, data.shape), operand)
    values = apply(op0.function, left, right)
    rows = values.reshape(data.shape[0], -1)
    partial = apply(lambda x: reduce_op.accumulate.reduce(x, axis=1, keepdims=True), rows)
    start = _start(reduce_cmd, reduce_op, reduce_init, data)
    total = apply(reduce_op.accumulate, start, partial).reshape(-1, 1)
    current().accumulators["vector"] = total
    write(dst, values.reshape(dst.shape))
    if reduce_res is not None:
        _write_reduced(reduce_res, -total if reduce_res_negate else total, data)
    extra = READ_ACCUMULATOR_CYCLES if reduce_res is not None else 0
    busy = cost.one_input("vector", data.num_free, extra)
    issue("vector", f"tensor_scalar_reduce({op0.name})", busy, (data, operand0, reduce_init), (dst, reduce_res))


def _start(command: reduce_cmd, op: Operator, initial: Scalar | None, data: NkiTensor) -> Array | np.float32:
    if (command is reduce_cmd.load_reduce) != (initial is not None):
        raise ConstraintViolation("reduce-command", f"{command} with initial value {initial!r}")
    if command is reduce_cmd.load_reduce:
        value = vector_operand(initial, data, "initial value")
        return value if np.ndim(value) == 0 else np.asarray(value).reshape(-1, 1)
    if command is reduce_cmd.reset_reduce:
        return np.float32(op.identity)
    held = current().accumulators.get("vector")
    if command is not reduce_cmd.reduce or held is None or held.shape[0] != data.shape[0]:
        raise ConstraintViolation("reduce-command", f"{command} on {data!r}")
    return held


def _write_reduced(result: NkiTensor, values: Array, data: NkiTensor) -> None:
    check_tile(result, "reduce_res")
    if result.shape[0] != data.shape[0] or result.num_free != 1:
        raise ConstraintViolation("reduce-result-shape", f"{result!r} for {data!r}")
    write(result, values.reshape(result.shape))


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Operator,
    op1: Operator,
    imm0: Scalar,
    imm1: Scalar | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    name: str | None = None,
) -> None:
    """dst[i] = op1(op0(src[i], imm0), dst[i - 1]) along the free dimensions."""
    check_tile(dst, "dst")
    check_tile(src, "src")
    check_same_shape(dst, src)
    check_operator(op0, ("arithmetic",), "op0")
    check_operator(op1, ("arithmetic",), "op1")
    if op1.name not in CUMULATIVE:
        raise ConstraintViolation("cumulative-operators", f"op1 is {op1!r}")
    if any(tensor.dtype in ("int32", "uint32") for tensor in (dst, src)):
        raise ConstraintViolation("cumulative-dtype", f"{src!r} into {dst!r}")
    assert op0.function is not None
    values = apply(op0.function, floats(src, src.shape), vector_operand(imm0, src, "imm0"))
    start = np.broadcast_to(_start(reduce_cmd, op1, imm1, src), (src.shape[0], 1)).astype(np.float32)
    result = _scan(values.reshape(src.shape[0], -1), start, op1)
    current().accumulators["vector"] = result[:, -1:]
    write(dst, result.reshape(dst.shape))
    issue("vector", "tensor_scalar_cumulative", cost.one_input("vector", src.num_free), (src, imm0, imm1), (dst,))


def _scan(values: Array, start: Array, op: Operator) -> Array:
    if op.name == "subtract":
        result = np.empty_like(values)
        held = start[:, 0]
        for i in range(values.shape[1]):
            held = values[:, i] - held
            result[:, i] = held
        return result
    with np.errstate(all="ignore"):
        return np.asarray(op.accumulate.accumulate(np.concatenate((start, values), axis=1), axis=1)[:, 1:])


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Scalar,
    op0: Operator,
    op1: Operator,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst[i] = op1(op0(data0[i], dst[i - 1]), data1[i])."""
    for tensor, role in ((dst, "dst"), (data0, "data0"), (data1, "data1")):
        check_tile(tensor, role)
    check_same_shape(dst, data0, data1)
    check_not_both_psum(data0, data1)
    first, second = check_operator(op0, ("arithmetic",), "op0"), check_operator(op1, ("arithmetic",), "op1")
    assert first.function is not None
    assert second.function is not None
    if isinstance(initial, NkiTensor) and (initial.shape[0] != dst.shape[0] or initial.num_free != 1):
        raise ConstraintViolation("scan-initial", f"initial {initial!r} for {dst!r}")
    rows = dst.shape[0]
    state = vector_operand(initial, data0, "initial", any_dtype=True)
    held = np.broadcast_to(np.asarray(state, dtype=np.float32).reshape(-1), (rows,))
    left, right = floats(data0, (rows, -1)), floats(data1, (rows, -1))
    result = np.empty_like(left)
    with np.errstate(all="ignore"):
        for i in range(left.shape[1]):
            held = first.function(held, left[:, i]) if reverse0 else first.function(left[:, i], held)
            held = second.function(right[:, i], held) if reverse1 else second.function(held, right[:, i])
            result[:, i] = held
    write(dst, result.reshape(dst.shape))
    issue("vector", "tensor_tensor_scan", cost.two_inputs("vector", dst.num_free), (data0, data1, initial), (dst,))


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Scalar,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_op: Operator = OPERATORS["maximum"],
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """dst = on_true where the predicate is not 0, else on_false; optionally its maximum."""
    for tensor, role in ((dst, "dst"), (predicate, "predicate"), (on_true, "on_true")):
        check_tile(tensor, role)
    check_same_shape(dst, predicate, on_true)
    check_not_both_psum(predicate, on_true)
    if predicate.dtype not in ("int8", "uint8", "int16", "uint16"):
        raise ConstraintViolation("select-predicate", f"{predicate!r}")
    if on_true.dtype in ("tfloat32", "int32", "uint32"):
        raise ConstraintViolation("select-dtype", f"{on_true!r}")
    if reduce_op.name != "maximum":
        raise ConstraintViolation("reduce-operator", f"reduce_op is {reduce_op!r}")
    chosen = (predicate.read().reshape(on_true.shape) != 0) != reverse_pred
    values = np.where(chosen, floats(on_true, on_true.shape), vector_operand(on_false, on_true, "on_false"))
    if reduce_cmd is not reduce_cmd.idle:
        start = _start(reduce_cmd, reduce_op, None, on_true)
        partial = values.reshape(on_true.shape[0], -1).max(axis=1, keepdims=True)
        current().accumulators["vector"] = np.maximum(start, partial)
    if reduce_res is not None:
        if reduce_cmd is reduce_cmd.idle:
            raise ConstraintViolation("reduce-command", "reduce_res with idle")
        _write_reduced(reduce_res, current().accumulators["vector"], on_true)
    write(dst, values.reshape(dst.shape))
    busy = cost.two_inputs("vector", dst.num_free)
    issue("vector", "select_reduce", busy, (predicate, on_true, on_false), (dst, reduce_res))


def nc_stream_shuffle(dst: NkiTensor, src: NkiTensor, shuffle_mask: list[int], name: str | None = None) -> None:
    """Within each 32 partitions, dst[i] = src[shuffle_mask[i]]; 255 leaves dst[i]."""
    check_tile(dst, "dst")
    check_tile(src, "src")
    if len(shuffle_mask) != QUADRANT or any(not (0 <= m < QUADRANT or m == KEEP) for m in shuffle_mask):
        raise ConstraintViolation("shuffle-mask", f"{shuffle_mask}")
    if dst.dtype != src.dtype:
        raise ConstraintViolation("shuffle-dtype", f"{src!r} into {dst!r}")
    if dst.num_free != src.num_free:
        raise ConstraintViolation("same-elements", f"{src!r} into {dst!r}")
    source, values = src.read(), dst.raw().copy()
    encoded = CODECS[dst.dtype].encode(source).reshape(src.shape[0], *dst.shape[1:])
    written = dst.written()
    for partition in range(dst.shape[0]):
        chosen = shuffle_mask[partition % QUADRANT]
        origin = partition // QUADRANT * QUADRANT % src.shape[0] + chosen
        if chosen != KEEP and origin < src.shape[0]:
            values[partition] = encoded[origin]
            written[partition] = True
    dst.raw()[...] = values
    issue("vector", "nc_stream_shuffle", cost.one_input("vector", src.num_free), (src, dst), (dst,))


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """(count, mean, variance * count) of the even and then of the odd elements."""
    check_tile(dst, "dst")
    check_tile(data, "data")
    if data.num_free > BN_STATS_WIDTH or dst.num_free != 6 or dst.shape[0] != data.shape[0]:
        raise ConstraintViolation("bn-stats-width", f"{data!r} into {dst!r}")
    rows = floats(data, (data.shape[0], -1))
    halves = [_moments(rows[:, start::2]) for start in (0, 1)]
    write(dst, np.concatenate(halves, axis=1).reshape(dst.shape))
    issue("vector", "bn_stats", cost.one_input("vector", data.num_free), (data,), (dst,))


def _moments(values: Array) -> Array:
    count = values.shape[1]
    if count == 0:
        return np.zeros((values.shape[0], 3), dtype=np.float32)
    mean = values.mean(axis=1, dtype=np.float32)
    spread = np.square(values - mean[:, None]).sum(axis=1, dtype=np.float32)
    return np.stack((np.full_like(mean, count), mean, spread), axis=1)


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Mean and variance from (count, mean, variance * count) triples."""
    check_tile(dst, "dst")
    check_tile(data, "data")
    if data.num_free % 3 or dst.num_free != 2 or dst.shape[0] != data.shape[0]:
        raise ConstraintViolation("bn-aggr-width", f"{data!r} into {dst!r}")
    count, mean, spread = np.moveaxis(floats(data, (data.shape[0], -1, 3)), 2, 0)
    total = count.sum(axis=1)
    average = (count * mean).sum(axis=1) / total
    variance = (spread + count * np.square(mean - average[:, None])).sum(axis=1) / total
    write(dst, np.stack((average, variance), axis=1).astype(np.float32).reshape(dst.shape))
    issue("vector", "bn_aggr", cost.one_input("vector", data.num_free), (data,), (dst,))
