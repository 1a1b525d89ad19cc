"""Owns allocated memory: bytes, and which elements have been written and by whom. Knows no view."""

import itertools
import math

import numpy as np
import numpy.typing as npt

from warmstate.kernels.nki_sim.dtypes import CODECS, Array
from warmstate.kernels.nki_sim.errors import ConstraintViolation

PARTITIONS = 128
SBUF_PARTITION_BYTES = 224 * 1024
PSUM_PARTITION_BYTES = 16 * 1024
PSUM_BANK_BYTES = 2 * 1024
HBM_BUFFERS = ("shared_hbm", "private_hbm")
BUFFERS = ("sbuf", "psum", *HBM_BUFFERS)

POISON = {"bfloat16": 0x7FC0, "float8_e4m3": 0x7F, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}
"""NaN in the bits of each dtype that numpy does not have."""

_serials = itertools.count()


class Storage:
    """One allocation. Fresh bytes are poison (NaN, or 4 in integers), and reading them is an error besides."""

    __slots__ = (
        "buffer",
        "by_matmul",
        "dtype",
        "is_full",
        "itemsize",
        "name",
        "raw",
        "row",
        "serial",
        "shape",
        "written",
    )

    def __init__(self, shape: tuple[int, ...], dtype: str, buffer: str, name: str = "") -> None:
        if dtype not in CODECS:
            raise ConstraintViolation("known-dtype", f"dtype {dtype!r}")
        if buffer not in BUFFERS:
            raise ConstraintViolation("known-buffer", f"buffer {buffer!r}")
        if not shape or any(not isinstance(size, (int, np.integer)) or size <= 0 for size in shape):
            raise ConstraintViolation("positive-shape", f"shape {shape}")
        codec = CODECS[dtype]
        self.buffer, self.dtype, self.name, self.shape = buffer, dtype, name, shape
        self.itemsize = codec.itemsize
        self.serial = next(_serials)
        count = math.prod(shape)
        self.row = count // shape[0] if self.is_on_chip else count
        if self.is_on_chip:
            self._check_size()
        self.raw: Array = np.full(count, POISON.get(dtype, np.nan if codec.is_float else 4), dtype=codec.raw)
        self.written: npt.NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        self.by_matmul: npt.NDArray[np.bool_] | None = np.zeros(count, dtype=np.bool_) if buffer == "psum" else None
        self.is_full = False

    @property
    def is_on_chip(self) -> bool:
        return self.buffer in ("sbuf", "psum")

    @property
    def partition_bytes(self) -> int:
        return self.row * self.itemsize

    def _check_size(self) -> None:
        if len(self.shape) < 2:
            raise ConstraintViolation("on-chip-rank", f"shape {self.shape}")
        if self.shape[0] > PARTITIONS:
            raise ConstraintViolation("partition-limit", f"{self.shape[0]} partitions")
        if self.buffer == "psum" and self.partition_bytes > PSUM_PARTITION_BYTES:
            raise ConstraintViolation("psum-size", f"{self.partition_bytes} bytes per partition")
        if self.buffer == "sbuf" and self.partition_bytes > SBUF_PARTITION_BYTES:
            raise ConstraintViolation("sbuf-size", f"{self.partition_bytes} bytes per partition")

    def fill(self, raw: Array) -> None:
        """Takes `raw` as the contents, all written."""
        self.raw[:] = raw.reshape(-1)
        self.written[:] = True
        self.is_full = True
