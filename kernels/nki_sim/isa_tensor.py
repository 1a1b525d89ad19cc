"""The tensor engine: nc_matmul and its transposes. ISA nc_matmul, nc_transpose."""

from typing import Any

import numpy as np
import torch

from warmstate.kernels.nki_sim import cost
from warmstate.kernels.nki_sim.dtypes import FP8, FULL_FLOATS, TWO_BYTE_FLOATS, Array
from warmstate.kernels.nki_sim.enums import engine, matmul_perf_mode
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.operands import apply, check_tile, chosen_engine, issue, write
from warmstate.kernels.nki_sim.storage import PSUM_BANK_BYTES
from warmstate.kernels.nki_sim.tensor import NkiTensor

MATMUL_DTYPES = (*FP8, *TWO_BYTE_FLOATS, *FULL_FLOATS)
MAX_STATIONARY = 128
MAX_MOVING = 512
MAX_VECTOR_TRANSPOSE = 32
TILE_SIZES = (32, 64, 128)
PRODUCT_COLUMNS = 8
"""Operands are padded to a multiple of this: a library sums one column, or one row, in another order than many."""


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> None:
    """dst (+)= stationary.T @ moving; stationary (K, M) and moving (K, N) in SBUF, dst (M, N) in PSUM."""
    for tensor, role in ((dst, "dst"), (stationary, "stationary"), (moving, "moving")):
        check_tile(tensor, role)
    double = perf_mode is matmul_perf_mode.double_row
    _check_inputs(stationary, moving, double)
    _check_tiling(stationary, tile_position, tile_size)
    _check_output(dst, stationary, moving, is_transpose, double)
    if is_transpose:
        _check_identity(moving)
        _write_by_matmul(dst, stationary.read().reshape(stationary.shape[0], -1).T)
        issue("tensor", "nc_matmul(transpose)", cost.transpose(stationary), (stationary, moving), (dst,))
        return
    product = _product(stationary, moving, double)
    accumulates = _accumulates(dst, accumulate)
    if accumulates:
        product = apply(np.add, dst.read().reshape(product.shape), product)
    _write_by_matmul(dst, product)
    busy = cost.matmul(stationary, moving, is_stationary_onezero or is_moving_onezero, double)
    issue("tensor", "nc_matmul", busy, (stationary, moving, dst) if accumulates else (stationary, moving), (dst,))


def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: engine = engine.unknown, name: str | None = None) -> None:
    """dst = data.T with the free dimensions of data flattened, bit by bit."""
    check_tile(data, "data")
    check_tile(dst, "dst")
    rows, columns = data.shape[0], data.num_free
    small = rows <= MAX_VECTOR_TRANSPOSE and columns <= MAX_VECTOR_TRANSPOSE
    fits_tensor = data.buffer == "sbuf" and dst.buffer == "psum"
    chosen = chosen_engine(engine, "vector" if small and not fits_tensor else "tensor", ("tensor", "vector"))
    limit = MAX_STATIONARY if chosen == "tensor" else MAX_VECTOR_TRANSPOSE
    if rows > limit or columns > limit:
        raise ConstraintViolation("transpose-size", f"{rows} x {columns} on the {chosen} engine")
    if dst.dtype != data.dtype:
        raise ConstraintViolation("transpose-dtype", f"{data!r} into {dst!r}")
    if chosen == "tensor" and not fits_tensor:
        raise ConstraintViolation("transpose-memory", f"{data!r} into {dst!r}")
    if dst.shape[0] != columns or dst.num_free != rows:
        raise ConstraintViolation("transpose-shape", f"{data!r} into {dst!r}")
    values = data.read().reshape(rows, columns).T
    if chosen == "tensor":
        _write_by_matmul(dst, values)
        issue("tensor", "nc_transpose", cost.transpose(data), (data,), (dst,))
    else:
        write(dst, values)
        issue("vector", "nc_transpose", cost.one_input("vector", columns), (data,), (dst,))


def _check_inputs(stationary: NkiTensor, moving: NkiTensor, double: bool) -> None:
    if stationary.buffer != "sbuf" or moving.buffer != "sbuf":
        raise ConstraintViolation("matmul-inputs-sbuf", f"{stationary!r}, {moving!r}")
    for tensor in (stationary, moving):
        if tensor.dtype not in MATMUL_DTYPES:
            raise ConstraintViolation("matmul-dtypes", f"{tensor!r}")
    if (stationary.dtype in FULL_FLOATS) != (moving.dtype in FULL_FLOATS):
        raise ConstraintViolation("matmul-dtype-pair", f"{stationary.dtype} with {moving.dtype}")
    if stationary.shape[0] != moving.shape[0]:
        raise ConstraintViolation("matmul-contraction", f"{stationary!r} with {moving!r}")
    if stationary.start_partition != moving.start_partition:
        raise ConstraintViolation("matmul-same-quadrant", f"{stationary.start_partition}, {moving.start_partition}")
    if double and any(t.dtype not in FP8 or t.ndim != 3 or t.shape[1] != 2 for t in (stationary, moving)):
        raise ConstraintViolation("double-row", f"{stationary!r}, {moving!r}")


def _check_tiling(stationary: NkiTensor, position: tuple[int, ...], size: tuple[int, ...]) -> None:
    if bool(position) != bool(size):
        raise ConstraintViolation("matmul-tile", f"tile_position={position}, tile_size={size}")
    if not size:
        return
    legal = all(s in TILE_SIZES and p % s == 0 and p + s <= MAX_STATIONARY for p, s in zip(position, size, strict=True))
    if not legal or stationary.shape[0] > size[0] or stationary.num_free > size[1]:
        raise ConstraintViolation("matmul-tile", f"position {position}, size {size}, stationary {stationary!r}")


def _check_output(dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool, double: bool) -> None:
    halves = 2 if double else 1
    rows, columns = stationary.num_free // halves, moving.num_free // halves
    if rows > MAX_STATIONARY:
        raise ConstraintViolation("matmul-stationary", f"{rows} columns")
    if columns > MAX_MOVING:
        raise ConstraintViolation("matmul-moving", f"{columns} columns")
    if dst.buffer != "psum":
        raise ConstraintViolation("matmul-output-psum", f"{dst!r}")
    if is_transpose and dst.dtype != stationary.dtype:
        raise ConstraintViolation("transpose-dtype", f"{stationary!r} into {dst!r}")
    if not is_transpose and dst.dtype != "float32":
        raise ConstraintViolation("matmul-output-float32", f"{dst!r}")
    if dst.shape[0] != rows or dst.num_free != columns:
        raise ConstraintViolation("matmul-output-shape", f"{rows} x {columns} into {dst!r}")
    first = dst.offset % dst.row * dst.itemsize
    spans = sum(stride * (count - 1) for stride, count in zip(dst.strides[1:], dst.shape[1:], strict=True))
    if first // PSUM_BANK_BYTES != (first + (spans + 1) * dst.itemsize - 1) // PSUM_BANK_BYTES:
        raise ConstraintViolation("matmul-bank", f"{dst!r} from byte {first}")


def _check_identity(moving: NkiTensor) -> None:
    values = moving.read().reshape(moving.shape[0], -1)
    if values.shape[0] != values.shape[1] or not np.array_equal(values, np.eye(values.shape[0])):
        raise ConstraintViolation("transpose-moving", f"{moving!r} is no identity")


def _product(stationary: NkiTensor, moving: NkiTensor, double: bool) -> Array:
    left, right = stationary.read(), moving.read()
    if double:
        left, right = (x.reshape(-1, x.shape[-1]) for x in (left, right))
    contraction = left.shape[0]
    # torch's product keeps to the threads that the caller allows; numpy's spins on all cores.
    first, second = (torch.from_numpy(np.ascontiguousarray(x).reshape(contraction, -1)) for x in (left, right))
    padded = torch.mm(_whole_columns(first).T, _whole_columns(second))
    return padded[: first.shape[1], : second.shape[1]].numpy()


def _whole_columns(operand: torch.Tensor) -> torch.Tensor:
    """`operand` [K, N] with zeros up to a multiple of PRODUCT_COLUMNS: no column's sum depends on its neighbours."""
    missing = -operand.shape[1] % PRODUCT_COLUMNS
    return torch.nn.functional.pad(operand, (0, missing)) if missing else operand


def _accumulates(dst: NkiTensor, accumulate: bool | None) -> bool:
    """Whether the result is added: as asked, or when a matmul wrote the whole output before."""
    if accumulate is False:
        return False
    mask = dst.matmul_mask()
    if mask.all():
        return True
    if accumulate is None and not mask.any():
        if dst.written().any():
            raise ConstraintViolation("accumulate-foreign", f"{dst!r}")
        return False
    if not dst.written().all():
        raise ConstraintViolation("accumulate-unwritten" if accumulate else "accumulate-mixed", f"{dst!r}")
    raise ConstraintViolation("accumulate-foreign", f"{dst!r}")


def _write_by_matmul(dst: NkiTensor, values: Any) -> None:
    dst.write(values)
    dst.matmul_mask()[...] = True
