"""Owns the mapped weight files: hands out tensors as views of them and gives the pages back. Knows no model."""

import mmap
from pathlib import Path

import torch

from warmstate.models.checkpoints.checkpoint import TensorEntry
from warmstate.models.errors import MissingFile

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of weights that are served."""


class WeightReader:
    """Maps each file on first use. A view stays valid after `release`: its pages would only be read again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}
        self._taken: list[TensorEntry] = []

    def take(self, entry: TensorEntry) -> torch.Tensor:
        """A view of one tensor in the file's dtype; nothing is copied. Never write to it."""
        self._taken.append(entry)
        mapped = self._map(entry.file)
        mapped.madvise(mmap.MADV_WILLNEED, *_pages(entry, outward=True))
        dtype = TORCH_DTYPES[entry.dtype]
        count = entry.num_bytes // dtype.itemsize
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.start).view(entry.shape)

    def release(self) -> int:
        """Gives back the memory of all that was taken so far and returns its size in bytes."""
        for entry in self._taken:
            start, length = _pages(entry, outward=False)
            if length:
                self._map(entry.file).madvise(mmap.MADV_DONTNEED, start, length)
        num_bytes = sum(entry.num_bytes for entry in self._taken)
        self._taken.clear()
        return num_bytes

    def _map(self, name: str) -> mmap.mmap:
        mapped = self._maps.get(name)
        if mapped is None:
            try:
                with (self._directory / name).open("rb") as file:
                    # A private writable mapping costs nothing until written; torch has no read-only tensors.
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except FileNotFoundError as error:
                raise MissingFile(f"{self._directory / name}: the file is gone") from error
            self._maps[name] = mapped
        return mapped


def _pages(entry: TensorEntry, outward: bool) -> tuple[int, int]:
    """Start and length of the pages that touch the tensor (outward), or that hold nothing else."""
    page = mmap.PAGESIZE
    if outward:
        start = entry.start // page * page
        return start, entry.stop - start
    start, stop = -(-entry.start // page) * page, entry.stop // page * page
    return start, max(0, stop - start)
