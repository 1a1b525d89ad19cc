"""Owns what stands between the brackets of a tensor: strict, nothing is clamped."""

import operator
from dataclasses import dataclass
from typing import Any

from warmstate.kernels.nki_sim.errors import OutOfRange


@dataclass(frozen=True, slots=True)
class DynamicSlice:
    """nl.ds(start, size)."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Item:
    """One dimension of an index: `count` elements from `start`, `step` apart; an integer is no slice."""

    start: int
    count: int
    step: int
    is_slice: bool


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a dense row-major tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def reshaped_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides of `target` over the same elements, or None where a copy would be needed."""
    sizes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    runs: list[list[int]] = []
    for size, stride in sizes:
        if runs and runs[-1][1] == stride * size:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    result: list[int] = []
    position = 0
    left = runs[0][0] if runs else 1
    for size in target:
        if size == 1:
            result.append(1)
            continue
        if left == 1:
            position += 1
            left = runs[position][0]
        if left % size:
            return None
        left //= size
        result.append(runs[position][1] * left)
    return tuple(result)


def normalised(key: Any, shape: tuple[int, ...]) -> list[Item]:
    """One item per dimension of `shape`; raises OutOfRange where numpy would clamp."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [k for k in keys if k is Ellipsis]:
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
    if len(keys) > len(shape):
        raise OutOfRange(f"{len(keys)} indices into {len(shape)} dimensions")
    keys += [slice(None)] * (len(shape) - len(keys))
    return [_item(k, size) for k, size in zip(keys, shape, strict=True)]


def _item(key: Any, size: int) -> Item:
    if isinstance(key, DynamicSlice):
        return _checked(key.start, key.start + key.size, 1, size)
    if isinstance(key, slice):
        start = 0 if key.start is None else operator.index(key.start)
        stop = size if key.stop is None else operator.index(key.stop)
        step = 1 if key.step is None else operator.index(key.step)
        return _checked(start + size if start < 0 else start, stop + size if stop < 0 else stop, step, size)
    index = operator.index(key)
    if not -size <= index < size:
        raise OutOfRange(f"index {index} into a dimension of {size}")
    return Item(index % size, 1, 1, False)


def _checked(start: int, stop: int, step: int, size: int) -> Item:
    if not 0 <= start < stop <= size or step < 1:
        raise OutOfRange(f"slice {start}:{stop}:{step} of a dimension of {size}")
    return Item(start, (stop - start + step - 1) // step, step, True)
