"""GpSimd: iota, affine_select and tensor_partition_reduce. ISA, the same names."""

import numpy as np

from warmstate.kernels.nki_sim import cost
from warmstate.kernels.nki_sim.dtypes import Array
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.operands import check_gpsimd, check_same_shape, check_tile, floats, issue, write
from warmstate.kernels.nki_sim.operators import COMPARISONS, OPERATORS, Operator
from warmstate.kernels.nki_sim.tensor import NkiTensor

PARTITION_REDUCTIONS = ("add", "maximum")


def iota(
    dst: NkiTensor, pattern: list[list[int]], offset: int = 0, channel_multiplier: int = 0, name: str | None = None
) -> None:
    """dst[p, ...] = offset + p * channel_multiplier + the pattern's own value."""
    check_tile(dst, "dst")
    if dst.buffer != "sbuf":
        raise ConstraintViolation("gpsimd-sbuf", f"{dst!r}")
    write(dst, _affine(dst, pattern, offset, channel_multiplier))
    issue("gpsimd", "iota", cost.one_input("gpsimd", dst.num_free), (), (dst,))


def affine_select(
    dst: NkiTensor,
    pattern: list[list[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Operator = OPERATORS["equal"],
    offset: int = 0,
    name: str | None = None,
) -> None:
    """on_true_tile where cmp_op(affine value, 0), else on_false_value; what is not selected does not matter."""
    check_tile(dst, "dst")
    check_tile(on_true_tile, "on_true_tile")
    check_same_shape(dst, on_true_tile)
    if "psum" in (dst.buffer, on_true_tile.buffer):
        raise ConstraintViolation("gpsimd-sbuf", f"{on_true_tile!r} into {dst!r}")
    if not isinstance(cmp_op, Operator) or cmp_op.name not in COMPARISONS:
        raise ConstraintViolation("affine-comparison", f"cmp_op is {cmp_op!r}")
    if isinstance(on_false_value, NkiTensor):
        raise ConstraintViolation("scalar-operand", "on_false_value is a tile")
    assert cmp_op.function is not None
    chosen = cmp_op.function(_affine(dst, pattern, offset, channel_multiplier), 0) != 0
    write(dst, np.where(chosen, on_true_tile.read().reshape(dst.shape), np.float32(on_false_value)))
    issue("gpsimd", "affine_select", cost.one_input("gpsimd", dst.num_free), (on_true_tile,), (dst,))


def tensor_partition_reduce(dst: NkiTensor, op: Operator, data: NkiTensor, name: str | None = None) -> None:
    """dst[0, ...] = the reduction of data over its partitions."""
    check_tile(dst, "dst")
    check_tile(data, "data")
    check_gpsimd("gpsimd", dst, data)
    if not isinstance(op, Operator) or op.name not in PARTITION_REDUCTIONS:
        raise ConstraintViolation("partition-reduce-operator", f"op is {op!r}")
    if dst.shape[0] != 1 or dst.num_free != data.num_free:
        raise ConstraintViolation("same-elements", f"{data!r} into {dst!r}")
    write(dst, op.accumulate.reduce(floats(data, data.shape), axis=0).reshape(dst.shape))
    issue("gpsimd", "tensor_partition_reduce", cost.one_input("gpsimd", data.num_free), (data,), (dst,))


def _affine(dst: NkiTensor, pattern: list[list[int]], offset: int, channel_multiplier: int) -> Array:
    if not 1 <= len(pattern) <= 4 or any(len(pair) != 2 for pair in pattern):
        raise ConstraintViolation("pattern-dims", f"pattern {pattern}")
    values = np.zeros((), dtype=np.int64)
    for step, count in pattern:
        values = values[..., None] + step * np.arange(count)
    if values.size != dst.num_free:
        raise ConstraintViolation("pattern-elements", f"pattern {pattern} for {dst!r}")
    rows = offset + channel_multiplier * np.arange(dst.shape[0])
    return (rows[:, None] + values.reshape(1, -1)).astype(np.int32).reshape(dst.shape)
