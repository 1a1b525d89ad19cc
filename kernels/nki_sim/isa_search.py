"""The eight largest of a row, on the vector engine. ISA max8, nc_find_index8, nc_match_replace8."""

import numpy as np

from warmstate.kernels.nki_sim import cost
from warmstate.kernels.nki_sim.dtypes import CODECS, Array
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.operands import check_same_shape, check_tile, floats, issue, write
from warmstate.kernels.nki_sim.tensor import NkiTensor

WIDTH = 8
MAX_ELEMENTS = 16384


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> None:
    """The 8 largest values of each partition, descending."""
    check_tile(dst, "dst")
    check_tile(src, "src")
    _check_widths(src, dst)
    rows = floats(src, (src.shape[0], -1))
    write(dst, -np.sort(-rows, axis=1)[:, :WIDTH].reshape(dst.shape))
    issue("vector", "max8", cost.one_input("vector", src.num_free), (src,), (dst,))


def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> None:
    """Where each of 8 values first occurs; equal values are paired with successive occurrences."""
    for tensor, role in ((dst, "dst"), (data, "data"), (vals, "vals")):
        check_tile(tensor, role)
    _check_widths(data, dst, vals)
    if dst.dtype not in ("uint16", "uint32"):
        raise ConstraintViolation("find8-index", f"{dst!r}")
    found = _positions(data, vals, ascending=True)
    missing = np.iinfo(CODECS[dst.dtype].raw).max
    write(dst, np.where(found < 0, missing, found).reshape(dst.shape))
    issue("vector", "nc_find_index8", cost.one_input("vector", data.num_free), (data, vals), (dst,))


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> None:
    """dst = data with one occurrence of each of 8 values replaced by imm; equal values are paired from the last."""
    for tensor, role in ((dst, "dst"), (data, "data"), (vals, "vals")):
        check_tile(tensor, role)
    check_same_shape(dst, data)
    _check_widths(data, vals)
    found = _positions(data, vals, ascending=False)
    rows = floats(data, (data.shape[0], -1)).copy()
    for partition, column in zip(*np.nonzero(found >= 0), strict=True):
        rows[partition, found[partition, column]] = imm
    write(dst, rows.reshape(dst.shape))
    if dst_idx is not None:
        check_tile(dst_idx, "dst_idx")
        if dst_idx.dtype not in ("uint16", "uint32"):
            raise ConstraintViolation("find8-index", f"{dst_idx!r}")
        missing = np.iinfo(CODECS[dst_idx.dtype].raw).max
        write(dst_idx, np.where(found < 0, missing, found).reshape(dst_idx.shape))
    issue("vector", "nc_match_replace8", cost.one_input("vector", data.num_free), (data, vals), (dst, dst_idx))


def _check_widths(data: NkiTensor, *eights: NkiTensor) -> None:
    if not WIDTH <= data.num_free <= MAX_ELEMENTS or any(tensor.num_free != WIDTH for tensor in eights):
        raise ConstraintViolation("max8-width", f"{data!r} with {eights!r}")
    if any(tensor.shape[0] != data.shape[0] for tensor in eights):
        raise ConstraintViolation("same-partitions", f"{data!r} with {eights!r}")


def _positions(data: NkiTensor, vals: NkiTensor, ascending: bool) -> Array:
    """[P, 8] positions, -1 where a value does not occur; each position is used once."""
    rows, wanted = floats(data, (data.shape[0], -1)), floats(vals, (vals.shape[0], WIDTH))
    result = np.full((rows.shape[0], WIDTH), -1, dtype=np.int64)
    columns = range(WIDTH) if ascending else range(WIDTH - 1, -1, -1)
    for partition in range(rows.shape[0]):
        used: dict[float, int] = {}
        for column in columns:
            value = float(wanted[partition, column])
            matches = np.nonzero(rows[partition] == value)[0]
            taken = used.get(value, 0)
            if taken < len(matches):
                result[partition, column] = matches[taken]
                used[value] = taken + 1
    return result
