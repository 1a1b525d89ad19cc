"""Owns the stored form of each NKI dtype: what a write rounds to and what a read gives. Knows no tensor.

Arithmetic is float32 (SHARED nki-dtype, "the engine automatically casts"); bytes are stored as the device stores them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Codec:
    """How a dtype lies in memory. `decode` gives float32, or the integers themselves."""

    itemsize: int
    raw: Any
    is_float: bool
    decode: Callable[[Array], Array]
    encode: Callable[[Array], Array]


def _identity(values: Array) -> Array:
    return values


def _by_torch(
    dtype: torch.dtype, raw: torch.dtype, unsigned: Any
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    signed = np.int16 if unsigned is np.uint16 else np.uint8

    def decode(stored: Array) -> Array:
        bits = torch.from_numpy(np.ascontiguousarray(stored).view(signed))
        return bits.view(dtype).float().numpy()

    def encode(values: Array) -> Array:
        dense = np.ascontiguousarray(values, dtype=np.float32)
        return torch.from_numpy(dense).to(dtype).view(raw).numpy().view(unsigned)

    return decode, encode


def _to_float32(values: Array) -> Array:
    return values.astype(np.float32)


def _to_float16(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _integer_codec(raw: Any) -> Codec:
    limits = np.iinfo(raw)

    def encode(values: Array) -> Array:
        if np.issubdtype(values.dtype, np.integer):
            return values.astype(raw)
        return np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max).astype(raw)

    return Codec(np.dtype(raw).itemsize, raw, False, _identity, encode)


def _tfloat32(values: Array) -> Array:
    """Ten mantissa bits, to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, bits).astype(np.uint32).view(np.float32)


def _e4m3_codec() -> Codec:
    """The float8_e4m3 of Trainium2: exponent 15 means infinity or NaN, so the largest value is 240 (OCP's is 448)."""
    decode_fn, encode_fn = _by_torch(torch.float8_e4m3fn, torch.uint8, np.uint8)

    def decode(stored: Array) -> Array:
        exponent, mantissa = (stored >> 3) & 15, stored & 7
        special = np.where(mantissa == 0, np.inf, np.nan) * np.where(stored >> 7, -1.0, 1.0)
        return np.where(exponent == 15, special, decode_fn(stored)).astype(np.float32)

    def encode(values: Array) -> Array:
        beyond = np.abs(values) >= 248.0
        sign = np.where(np.signbit(values), np.uint8(0x80), np.uint8(0))
        codes = np.where(beyond, sign | np.uint8(0x78), encode_fn(np.where(beyond, 0.0, values)))
        return np.where(np.isnan(values), np.uint8(0x7F), codes).astype(np.uint8)

    return Codec(1, np.uint8, True, decode, encode)


CODECS: dict[str, Codec] = {
    "float32": Codec(4, np.float32, True, _identity, lambda values: values.astype(np.float32, copy=False)),
    "tfloat32": Codec(4, np.float32, True, _identity, _tfloat32),
    "float16": Codec(2, np.float16, True, _to_float32, _to_float16),
    "bfloat16": Codec(2, np.uint16, True, *_by_torch(torch.bfloat16, torch.int16, np.uint16)),
    "float8_e4m3": _e4m3_codec(),
    "float8_e4m3fn": Codec(1, np.uint8, True, *_by_torch(torch.float8_e4m3fn, torch.uint8, np.uint8)),
    "float8_e5m2": Codec(1, np.uint8, True, *_by_torch(torch.float8_e5m2, torch.uint8, np.uint8)),
    "int32": _integer_codec(np.int32),
    "uint32": _integer_codec(np.uint32),
    "int16": _integer_codec(np.int16),
    "uint16": _integer_codec(np.uint16),
    "int8": _integer_codec(np.int8),
    "uint8": _integer_codec(np.uint8),
    "bool": _integer_codec(np.uint8),
}

FP8 = ("float8_e4m3", "float8_e5m2")
TWO_BYTE_FLOATS = ("bfloat16", "float16")
FULL_FLOATS = ("float32", "tfloat32")


def rounded(values: Array, dtype: str) -> Array:
    """What is read back after `values` are stored as `dtype`."""
    codec = CODECS[dtype]
    return codec.decode(codec.encode(values))
