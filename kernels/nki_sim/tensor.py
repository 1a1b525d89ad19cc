"""Owns the tensor that kernels see: a strided view of a storage, and its reads and writes. Knows no instruction."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from warmstate.kernels.nki_sim.dtypes import CODECS, Array
from warmstate.kernels.nki_sim.errors import ConstraintViolation, OutOfRange, UnwrittenRead
from warmstate.kernels.nki_sim.indexing import normalised, reshaped_strides, strides_of
from warmstate.kernels.nki_sim.registers import VirtualRegister
from warmstate.kernels.nki_sim.storage import Storage


@dataclass(frozen=True, slots=True)
class Rows:
    """A gather or scatter: partition p lies at `indices[p] * stride` elements; `bound` is the number of rows."""

    indices: Array
    stride: int
    bound: int
    source: "NkiTensor"


@dataclass(frozen=True, slots=True)
class DynamicOffset:
    """A run-time offset that is already part of the view; outside `bound` the view must not be touched."""

    index: int
    bound: int
    source: "NkiTensor | None"


class NkiTensor:
    """A view: element strides over one storage. Every method gives another view of the same bytes (LANG NkiTensor)."""

    __slots__ = ("dtype", "dynamic", "offset", "rows", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        rows: Rows | None = None,
        dynamic: DynamicOffset | None = None,
    ) -> None:
        self.storage, self.dtype, self.shape, self.strides, self.offset = storage, dtype, shape, strides, offset
        self.rows, self.dynamic = rows, dynamic

    @classmethod
    def whole(cls, storage: Storage) -> "NkiTensor":
        return cls(storage, storage.dtype, storage.shape, strides_of(storage.shape), 0)

    def __repr__(self) -> str:
        return f"{self.buffer} {self.dtype}{list(self.shape)}{' ' + self.storage.name if self.storage.name else ''}"

    @property
    def buffer(self) -> str:
        return self.storage.buffer

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return CODECS[self.dtype].itemsize

    @property
    def is_on_chip(self) -> bool:
        return self.storage.is_on_chip

    @property
    def num_free(self) -> int:
        """Elements per partition."""
        return math.prod(self.shape[1:])

    @property
    def row(self) -> int:
        """Elements of this dtype in one partition of the storage."""
        return self.storage.partition_bytes // self.itemsize

    @property
    def start_partition(self) -> int:
        return self.offset // self.row

    def is_contiguous(self) -> bool:
        first = 1 if self.is_on_chip else 0
        expected = strides_of(self.shape)
        return all(self.shape[dim] == 1 or self.strides[dim] == expected[dim] for dim in range(first, self.ndim))

    def is_indirect(self) -> bool:
        return self.rows is not None or self.dynamic is not None

    def get_pattern(self) -> list[list[int]]:
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]

    def _view(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None) -> "NkiTensor":
        start = self.offset if offset is None else offset
        return NkiTensor(self.storage, self.dtype, shape, strides, start, self.rows, self.dynamic)

    def __getitem__(self, key: Any) -> "NkiTensor":
        shape, strides, offset = [], [], self.offset
        for dim, item in enumerate(normalised(key, self.shape)):
            stride = self.strides[dim]
            offset += item.start * stride
            if item.is_slice or (self.is_on_chip and dim == 0):
                shape.append(item.count)
                strides.append(stride * item.step)
        least = 2 if self.is_on_chip else 1
        while len(shape) < least:
            shape.append(1)
            strides.append(1)
        return self._view(tuple(shape), tuple(strides), offset)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise ConstraintViolation("no-assignment", f"assignment to {self!r}")

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> "NkiTensor":
        return self[tuple(slice(start, end, step) if i == dim else slice(None) for i in range(self.ndim))]

    def select(self, dim: int, index: "int | NkiTensor | VirtualRegister") -> "NkiTensor":
        kept = [i for i in range(self.ndim) if i != dim]
        if not isinstance(index, (NkiTensor, VirtualRegister)):
            item = normalised(tuple(index if i == dim else slice(None) for i in range(self.ndim)), self.shape)[dim]
            offset, dynamic = self.offset + item.start * self.strides[dim], self.dynamic
        else:
            self._require_static()
            dynamic = _dynamic_offset(index, self.shape[dim])
            offset = self.offset + dynamic.index * self.strides[dim]
        shape, strides = tuple(self.shape[i] for i in kept), tuple(self.strides[i] for i in kept)
        return NkiTensor(self.storage, self.dtype, shape, strides, offset, self.rows, dynamic)

    def vector_select(self, dim: int, vector_offset: "NkiTensor") -> "NkiTensor":
        pattern = self.get_pattern()
        pattern[dim][1] = vector_offset.shape[0]
        return self.ap(pattern, vector_offset=vector_offset, indirect_dim=dim)

    def permute(self, dims: tuple[int, ...]) -> "NkiTensor":
        if sorted(dims) != list(range(self.ndim)):
            raise ConstraintViolation("permutation", f"permute{tuple(dims)} of {self!r}")
        if self.is_on_chip and dims[0] != 0:
            raise ConstraintViolation("partition-permute", f"permute{tuple(dims)} of {self!r}")
        return self._view(tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims))

    def broadcast(self, dim: int, size: int) -> "NkiTensor":
        if self.is_on_chip and dim == 0:
            raise ConstraintViolation("broadcast-partition", f"broadcast of {self!r}")
        if self.shape[dim] != 1:
            raise ConstraintViolation("broadcast-size-1", f"dimension {dim} of {self!r}")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._view(tuple(shape), tuple(strides))

    def expand_dim(self, dim: int) -> "NkiTensor":
        if self.is_on_chip and dim == 0:
            raise ConstraintViolation("partition-reshape", f"expand_dim(0) of {self!r}")
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(dim, 1)
        strides.insert(dim, 1)
        return self._view(tuple(shape), tuple(strides))

    def squeeze_dim(self, dim: int) -> "NkiTensor":
        if self.is_on_chip and dim == 0:
            raise ConstraintViolation("partition-reshape", f"squeeze_dim(0) of {self!r}")
        if self.shape[dim] != 1:
            raise ConstraintViolation("squeeze-size-1", f"dimension {dim} of {self!r}")
        kept = [i for i in range(self.ndim) if i != dim]
        return self._view(tuple(self.shape[i] for i in kept), tuple(self.strides[i] for i in kept))

    def reshape_dim(self, dim: int, shape: tuple[int, ...]) -> "NkiTensor":
        known = -math.prod(shape) if -1 in shape else 1
        sizes = tuple(self.shape[dim] // known if size == -1 else size for size in shape)
        if math.prod(sizes) != self.shape[dim]:
            raise ConstraintViolation("reshape-size", f"{self.shape[dim]} into {shape}")
        if self.is_on_chip and dim == 0 and len(sizes) > 1:
            raise ConstraintViolation("partition-reshape", f"reshape_dim(0, {shape}) of {self!r}")
        strides = tuple(self.strides[dim] * stride for stride in strides_of(sizes))
        return self._view(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *strides, *self.strides[dim + 1 :]),
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> "NkiTensor":
        merged = math.prod(self.shape[start_dim : end_dim + 1])
        return self.reshape((*self.shape[:start_dim], merged, *self.shape[end_dim + 1 :]))

    def reshape(self, shape: tuple[int, ...]) -> "NkiTensor":
        shape = tuple(shape)
        if math.prod(shape) != self.size:
            raise ConstraintViolation("reshape-size", f"{self!r} into {shape}")
        if self.is_on_chip and shape[0] != self.shape[0]:
            raise ConstraintViolation("partition-reshape", f"{self!r} into {shape}")
        head, tail = (1, shape[1:]) if self.is_on_chip else (0, shape)
        strides = reshaped_strides(self.shape[head:], self.strides[head:], tail)
        if strides is None:
            raise ConstraintViolation("contiguous-reshape", f"{self!r} into {shape}")
        return self._view(shape, (*self.strides[:head], *strides))

    def view(self, dtype: str) -> "NkiTensor":
        self._require_static()
        old, new = self.itemsize, CODECS[dtype].itemsize
        last_bytes = self.shape[-1] * old
        misaligned = any(stride * old % new for stride in (*self.strides[:-1], self.offset))
        if self.strides[-1] != 1 or last_bytes % new or misaligned:
            raise ConstraintViolation("view-dtype", f"{self!r} as {dtype}")
        strides = (*(stride * old // new for stride in self.strides[:-1]), 1)
        shape = (*self.shape[:-1], last_bytes // new)
        return NkiTensor(self.storage, dtype, shape, strides, self.offset * old // new)

    reinterpret_cast = view

    def indirect(self, index: "NkiTensor", num_elem: int | None = None) -> "NkiTensor":
        raise ConstraintViolation("trn3-only", f".indirect() of {self!r}")

    def ap(
        self,
        pattern: list[list[int]],
        offset: int | None = None,
        scalar_offset: "NkiTensor | VirtualRegister | None" = None,
        vector_offset: "NkiTensor | None" = None,
        indirect_dim: int = 0,
        dtype: str | None = None,
    ) -> "NkiTensor":
        """The view of an explicit [[stride, count], ...] pattern, from this view's start."""
        base = self if dtype is None else self._as(dtype)
        shape, strides = tuple(count for _, count in pattern), tuple(stride for stride, _ in pattern)
        start = base.offset + (offset or 0)
        if scalar_offset is None and vector_offset is None:
            view = NkiTensor(self.storage, base.dtype, shape, strides, start, self.rows, self.dynamic)
            view.require_inside()
            return view
        self._require_static()
        if scalar_offset is not None and vector_offset is not None:
            raise ConstraintViolation("one-dynamic-select", "scalar_offset with vector_offset")
        stride, bound = self.strides[indirect_dim] * self.itemsize // base.itemsize, self.shape[indirect_dim]
        if scalar_offset is not None:
            dynamic = _dynamic_offset(scalar_offset, bound)
            return NkiTensor(self.storage, base.dtype, shape, strides, start + dynamic.index * stride, None, dynamic)
        assert vector_offset is not None
        if self.is_on_chip:
            raise ConstraintViolation("vector-offset-hbm", f"vector_offset into {self!r}")
        if vector_offset.buffer != "sbuf" or vector_offset.shape != (shape[0], 1) or vector_offset.itemsize != 4:
            raise ConstraintViolation("vector-offset-shape", f"{vector_offset!r} for {shape[0]} partitions")
        rows = Rows(vector_offset.read().reshape(-1).astype(np.int64), stride, bound, vector_offset)
        return NkiTensor(self.storage, base.dtype, shape, strides, start, rows)

    def _as(self, dtype: str) -> "NkiTensor":
        old, new = self.itemsize, CODECS[dtype].itemsize
        return NkiTensor(self.storage, dtype, self.shape, self.strides, self.offset * old // new)

    def _require_static(self) -> None:
        if self.is_indirect():
            raise ConstraintViolation("one-dynamic-select", f"{self!r} is indirect already")

    def require_inside(self) -> None:
        last = self.offset + sum(stride * (count - 1) for stride, count in zip(self.strides, self.shape, strict=True))
        if self.offset < 0 or last >= self.storage.raw.nbytes // self.itemsize or min(self.shape) < 1:
            raise OutOfRange(f"pattern {self.get_pattern()} from {self.offset} leaves {self.storage.shape}")

    def read(self) -> Array:
        """The values, as float32 or as integers; an unwritten element is an error."""
        storage = self.storage
        if not storage.is_full and not np.all(self.written()):
            raise UnwrittenRead(f"{self!r} is read before it is written")
        return CODECS[self.dtype].decode(self.raw())

    def write(self, values: Array) -> None:
        """Rounds `values` to the dtype and stores them."""
        self.raw()[...] = CODECS[self.dtype].encode(values).reshape(self.shape)
        self.mark_written()

    def raw(self) -> Array:
        """The bytes in place, in the codec's raw dtype; not for gathers."""
        size = self.itemsize
        strides = tuple(stride * size for stride in self.strides)
        raw: Any = CODECS[self.dtype].raw
        return np.ndarray(self.shape, raw, self.storage.raw.data, self.offset * size, strides)

    def written(self) -> Array:
        storage = self.storage
        if self.itemsize == storage.itemsize:
            return np.ndarray(self.shape, np.bool_, storage.written.data, self.offset, self.strides)
        return storage.written

    def mark_written(self) -> None:
        if self.storage.is_full:
            return
        if self.itemsize != self.storage.itemsize and self.size * self.itemsize != self.storage.raw.nbytes:
            raise ConstraintViolation("view-dtype", f"partial write through a reinterpreted view {self!r}")
        self.written()[...] = True
        if self.size * self.itemsize == self.storage.raw.nbytes and 0 not in self.strides:
            self.storage.is_full = True

    def matmul_mask(self) -> Array:
        """Which elements of a PSUM tile a matmul wrote."""
        assert self.storage.by_matmul is not None
        if self.itemsize == self.storage.itemsize:
            return np.ndarray(self.shape, np.bool_, self.storage.by_matmul.data, self.offset, self.strides)
        return self.storage.by_matmul


def _dynamic_offset(source: "NkiTensor | VirtualRegister", bound: int) -> DynamicOffset:
    if isinstance(source, VirtualRegister):
        return DynamicOffset(source.value(), bound, None)
    if source.size != 1 or source.itemsize != 4 or CODECS[source.dtype].is_float:
        raise ConstraintViolation("scalar-offset-shape", f"scalar offset {source!r}")
    return DynamicOffset(int(source.read().reshape(-1)[0]), bound, source)
