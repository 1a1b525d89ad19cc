"""nki.language: allocation, loops, programs and dtypes (API reference, `nki/api/nki/language`).

`language_math` has what works on tiles.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from warmstate.kernels.nki_sim import isa_dma, isa_elementwise, language_math
from warmstate.kernels.nki_sim.dtypes import CODECS, Array
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.indexing import DynamicSlice
from warmstate.kernels.nki_sim.program import current
from warmstate.kernels.nki_sim.registers import VirtualRegister
from warmstate.kernels.nki_sim.storage import (
    HBM_BUFFERS,
    PARTITIONS,
    PSUM_BANK_BYTES,
    PSUM_PARTITION_BYTES,
    SBUF_PARTITION_BYTES,
)
from warmstate.kernels.nki_sim.tensor import NkiTensor


class NKIObject:
    """The base of a kernel's own configuration objects: fields are annotated, and given by keyword."""

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)


class TileSize:
    """nl.tile_size of NeuronCore-v3."""

    pmax = PARTITIONS
    psum_fmax = psum_bank_fmax = PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = PSUM_BANK_BYTES
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_num_banks = PSUM_PARTITION_BYTES // PSUM_BANK_BYTES
    sbuf_fmax_bytes = total_available_sbuf_size = SBUF_PARTITION_BYTES
    sbuf_fmax = SBUF_PARTITION_BYTES // 4
    sbuf_size_bytes = SBUF_PARTITION_BYTES * PARTITIONS


def ndarray(
    shape: Any, dtype: str, buffer: str = "sbuf", name: str = "", address: tuple[int, int] | None = None
) -> NkiTensor:
    """Fresh, unwritten memory. An explicit address is taken as a hint and not simulated."""
    return current().allocate(tuple(shape), dtype, buffer, name)


def zeros(shape: Any, dtype: str, buffer: str = "sbuf", name: str = "") -> NkiTensor:
    tensor = ndarray(shape, dtype, buffer, name)
    isa_elementwise.memset(tensor, 0.0 if CODECS[dtype].is_float else 0)
    return tensor


def full(shape: Any, fill_value: float, dtype: str, buffer: str = "sbuf", name: str = "") -> NkiTensor:
    tensor = ndarray(shape, dtype, buffer, name)
    isa_elementwise.memset(tensor, fill_value)
    return tensor


def ones(shape: Any, dtype: str, buffer: str = "sbuf", name: str = "") -> NkiTensor:
    return full(shape, 1.0 if CODECS[dtype].is_float else 1, dtype, buffer, name)


def zeros_like(x: NkiTensor, dtype: str | None = None, buffer: str = "sbuf", name: str = "") -> NkiTensor:
    return zeros(x.shape, dtype or x.dtype, buffer, name)


def empty_like(x: NkiTensor, dtype: str | None = None, buffer: str | None = None, name: str = "") -> NkiTensor:
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """The values of a tensor to stdout, after `print_prefix`."""
    print(print_prefix, tensor.read())


def load(src: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """A new SBUF tile with the values of an HBM tensor."""
    shape = src.shape if src.ndim > 1 else (1, *src.shape)
    tile = ndarray(shape, src.dtype if dtype is None else dtype)
    isa_dma.dma_copy(tile, src)
    return tile


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Writes an SBUF tile to HBM."""
    isa_dma.dma_copy(dst, value)


def shared_constant(constant: Array) -> NkiTensor:
    """An HBM tensor with constant contents."""
    values = np.asarray(constant)
    tensor = ndarray(values.shape, str(values.dtype), "shared_hbm")
    tensor.storage.fill(values)
    return tensor


def shared_identity_matrix(n: int, dtype: str = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """An SBUF tile with the identity of size n."""
    tile = ndarray((n, n), dtype) if dst is None else dst
    source = ndarray((n, n), dtype, "private_hbm")
    source.write(np.eye(n, dtype=np.float32))
    isa_dma.dma_copy(tile, source)
    return tile


def fori_loop(
    lower: int | VirtualRegister,
    upper: int | VirtualRegister,
    body_fun: Callable[[VirtualRegister], None],
    step: int = 1,
) -> None:
    """Runs body_fun(i) for lower <= i < upper, i a register."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ConstraintViolation("loop-step", f"step {step!r}")
    first, last = (bound.value() if isinstance(bound, VirtualRegister) else bound for bound in (lower, upper))
    for i in range(first, last, step):
        body_fun(VirtualRegister(i))


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """Runs body_fun on the register that it returns, until that is 0."""
    register = init
    while register.value() != 0:
        register = body_fun(register)


def loop_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """affine_range, sequential_range and static_range: all unrolled since NKI 0.4."""
    return range(start) if stop is None else range(start, stop, step)


def program_id(axis: int = 0) -> int:
    return current().core if axis == 0 else 0


def num_programs(axes: int = 0) -> int:
    return current().num_cores if axes == 0 else 1


def program_ndim() -> int:
    return 1 if current().num_cores > 1 else 0


def is_hbm(buffer: str) -> bool:
    return buffer in HBM_BUFFERS


def is_sbuf(buffer: str) -> bool:
    return buffer == "sbuf"


def is_psum(buffer: str) -> bool:
    return buffer == "psum"


def is_on_chip(buffer: str) -> bool:
    return buffer in ("sbuf", "psum")


def namespace() -> dict[str, Any]:
    """Everything that `nki.language` offers here."""
    names: dict[str, Any] = {name: name for name in CODECS if name != "bool"}
    names |= {"bool_": "bool", "sbuf": "sbuf", "psum": "psum", "shared_hbm": "shared_hbm"}
    names |= {"private_hbm": "private_hbm", "hbm": "private_hbm"}
    names |= language_math.namespace() | {"tile_size": TileSize(), "ds": DynamicSlice}
    names |= {"affine_range": loop_range, "sequential_range": loop_range, "static_range": loop_range}
    functions: tuple[Callable[..., Any], ...] = (ndarray, zeros, ones, full, load, store, shared_constant)
    functions += (
        zeros_like,
        empty_like,
        device_print,
        shared_identity_matrix,
        fori_loop,
        while_loop,
        program_id,
        num_programs,
        program_ndim,
    )
    functions += (is_hbm, is_sbuf, is_psum, is_on_chip, NkiTensor, NKIObject)
    return names | {function.__name__: function for function in functions}
