"""DMA: dma_copy and dma_transpose. ISA, the same names; TRN2, DGE."""

from typing import Any

import numpy as np

from warmstate.kernels.nki_sim import cost
from warmstate.kernels.nki_sim import cost_constants as constants
from warmstate.kernels.nki_sim.dtypes import CODECS, Array
from warmstate.kernels.nki_sim.enums import dge_mode, engine, oob_mode
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.program import record
from warmstate.kernels.nki_sim.tensor import NkiTensor
from warmstate.kernels.nki_sim.trace import Instruction, region

TRANSPOSES = ((1, 0), (2, 1, 0), (3, 1, 2, 0))
HWDGE_ROWS = (1, 2, 4, 8, 16)


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> None:
    """dst = src between HBM and SBUF, in order of elements, through float32 between dtypes; gathers and scatters."""
    _check_memory(dst, src)
    _check_descriptors(dst, src, dge_mode, engine, priority)
    if dst.size != src.size:
        raise ConstraintViolation("dma-elements", f"{src!r} into {dst!r}")
    if (dst.rows is not None or src.rows is not None) and _squeezed(dst.shape) != _squeezed(src.shape):
        raise ConstraintViolation("dma-shape", f"{src!r} into {dst!r}")
    skips = oob_mode is oob_mode.skip
    source, target = _rows_in_bounds(src, skips), _rows_in_bounds(dst, skips)
    if source is None or target is None:
        _issue("dma_copy", dst, src, 0, constants.DMA_BYTES_PER_NS, 1.0, dge_mode)
        return
    _move(dst, src, target, source)
    _issue("dma_copy", dst, src, dst.size * dst.itemsize, min(_run_bytes(dst), _run_bytes(src)), 1.0, dge_mode)


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: tuple[int, ...] | None = None,
    priority: int | None = None,
    dge_mode: dge_mode = dge_mode.unknown,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> None:
    """dst = src with its dimensions permuted, the last one onto the partitions."""
    _check_memory(dst, src)
    if dst.buffer != "sbuf":
        raise ConstraintViolation("dma-transpose-sbuf", f"{dst!r}")
    if dst.dtype != src.dtype:
        raise ConstraintViolation("dma-transpose-dtype", f"{src!r} into {dst!r}")
    permutation = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}.get(src.ndim) if axes is None else tuple(axes)
    if permutation not in TRANSPOSES or len(permutation) != src.ndim:
        raise ConstraintViolation("dma-transpose-axes", f"axes {axes} of {src!r}")
    if dst.shape != tuple(src.shape[a] for a in permutation):
        raise ConstraintViolation("dma-transpose-shape", f"{src!r} into {dst!r}")
    if dge_mode is dge_mode.hwdge:
        _check_hardware_transpose(src)
    if src.is_indirect():
        raise ConstraintViolation("dma-hwdge-indirect", f"transposing gather of {src!r}")
    dst.raw()[...] = CODECS[dst.dtype].encode(src.read()).transpose(permutation)
    dst.mark_written()
    from_hbm = not src.is_on_chip
    efficiency = constants.DMA_TRANSPOSE_EFFICIENCY if from_hbm else constants.DMA_SBUF_TRANSPOSE_EFFICIENCY
    _issue("dma_transpose", dst, src, dst.size * dst.itemsize, _run_bytes(src), efficiency, dge_mode)


def _check_memory(dst: Any, src: Any) -> None:
    for tensor in (dst, src):
        if not isinstance(tensor, NkiTensor):
            raise ConstraintViolation("on-chip-operand", f"{tensor!r} is no tensor")
        if tensor.buffer == "psum":
            raise ConstraintViolation("dma-psum", f"{tensor!r}")


def _check_descriptors(dst: NkiTensor, src: NkiTensor, mode: dge_mode, asked: engine, priority: int | None) -> None:
    if priority is not None:
        raise ConstraintViolation("dma-priority", f"priority {priority}")
    hardware = mode is dge_mode.hwdge
    if asked is not engine.unknown and (not hardware or asked not in (engine.sync, engine.scalar)):
        raise ConstraintViolation("dma-engine", f"{asked} with {mode}")
    if hardware and dst.dtype != src.dtype:
        raise ConstraintViolation("dma-hwdge-dtype", f"{src!r} into {dst!r}")
    if hardware and (dst.rows is not None or src.rows is not None):
        raise ConstraintViolation("dma-hwdge-indirect", f"{src!r} into {dst!r}")
    if mode is dge_mode.none and (dst.is_indirect() or src.is_indirect()):
        raise ConstraintViolation("dma-static-dynamic", f"{src!r} into {dst!r}")


def _check_hardware_transpose(src: NkiTensor) -> None:
    rows = src.shape[0]
    legal = rows == 16 if src.ndim == 2 else rows in HWDGE_ROWS and rows * src.shape[-2] % 16 == 0
    if not legal or src.shape[-1] > 128 or src.itemsize != 2:
        raise ConstraintViolation("dma-transpose-hwdge", f"{src!r}")


def _rows_in_bounds(tensor: NkiTensor, skips: bool) -> Array | None:
    """The partitions that a transfer touches; None where a dynamic offset lies outside and is skipped."""
    everything = np.arange(tensor.shape[0])
    if tensor.dynamic is not None:
        if 0 <= tensor.dynamic.index < tensor.dynamic.bound:
            return everything
        if skips:
            return None
        raise ConstraintViolation("dma-bounds", f"index {tensor.dynamic.index} of {tensor.dynamic.bound}")
    if tensor.rows is None:
        return everything
    inside = (tensor.rows.indices >= 0) & (tensor.rows.indices < tensor.rows.bound)
    if not skips and not inside.all():
        raise ConstraintViolation("dma-bounds", f"indices {tensor.rows.indices[~inside]} of {tensor.rows.bound}")
    return everything[inside]


def _move(dst: NkiTensor, src: NkiTensor, target: Array, source: Array) -> None:
    if dst.rows is None and src.rows is None:
        values = src.read()
        dst.write((values if src.dtype == dst.dtype else values.astype(np.float32)).reshape(dst.shape))
        return
    for partition in np.intersect1d(target, source):
        values = _row(src, int(partition)).read()
        row = _row(dst, int(partition))
        row.write((values if src.dtype == dst.dtype else values.astype(np.float32)).reshape(row.shape))


def _row(tensor: NkiTensor, partition: int) -> NkiTensor:
    """One partition of a transfer, wherever its row lies."""
    step = partition * tensor.strides[0]
    if tensor.rows is not None:
        step = int(tensor.rows.indices[partition]) * tensor.rows.stride
    shape = (1, *tensor.shape[1:])
    row = NkiTensor(tensor.storage, tensor.dtype, shape, tensor.strides, tensor.offset + step)
    row.require_inside()
    return row


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _run_bytes(tensor: NkiTensor) -> int:
    """Bytes that lie next to each other, at most one partition's."""
    run = 1
    first = 1 if tensor.is_on_chip else 0
    for stride, count in zip(reversed(tensor.strides[first:]), reversed(tensor.shape[first:]), strict=True):
        if count == 1:
            continue
        if stride != run:
            break
        run *= count
    return run * tensor.itemsize


def _issue(
    operation: str, dst: NkiTensor, src: NkiTensor, num_bytes: int, run_bytes: float, efficiency: float, mode: dge_mode
) -> None:
    busy = cost.dma(num_bytes, int(run_bytes), efficiency)
    offsets = [t.rows.source for t in (dst, src) if t.rows is not None]
    offsets += [t.dynamic.source for t in (dst, src) if t.dynamic is not None and t.dynamic.source is not None]
    hardware = mode is dge_mode.hwdge or (mode is dge_mode.unknown and (dst.dynamic or src.dynamic))
    software = dst.rows is not None or src.rows is not None or mode is dge_mode.swdge
    instruction = Instruction(
        "dma-in" if dst.is_on_chip else "dma-out",
        operation,
        busy,
        constants.DMA_LATENCY_NS,
        (region(src), *map(region, offsets)),
        (region(dst),),
        num_bytes,
        "gpsimd" if software else "sync" if hardware else None,
        constants.HWDGE_ISSUE_NS if software or hardware else 0.0,
    )
    record(instruction, dst, src, *offsets)
