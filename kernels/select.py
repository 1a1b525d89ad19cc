"""Chooses an implementation per operator and says why, once per process and choice."""

import logging
from dataclasses import dataclass
from functools import cache

import torch

from warmstate.kernels.linear_torch import (
    FewRowsNativeLinear,
    Linear,
    NativeLinear,
    UpcastLinear,
    rows_keep_their_bits,
)
from warmstate.kernels.pointwise_torch import ExactPointwise, FusedPointwise, Pointwise

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operators that have more than one implementation."""

    linear: Linear
    pointwise: Pointwise


def select_kernels(dtype: torch.dtype, deterministic: bool) -> Kernels:
    """The operators for weights of `dtype`; `deterministic` asks for results that depend on nothing but their row."""
    linear, reason = _select_linear(dtype, deterministic)
    pointwise = ExactPointwise() if deterministic else FusedPointwise()
    _log_once("linear", type(linear).__name__, reason)
    _log_once("pointwise", type(pointwise).__name__, "deterministic mode" if deterministic else "one pass each")
    return Kernels(linear, pointwise)


def select_nki(operator: str, support: tuple[bool, str], has_neuron: bool) -> tuple[bool, str]:
    """Whether the NKI kernel of `operator` serves a call, and why; `support` is what `nki_support` says of its shape.

    The simulator never serves: without a Neuron device the answer is torch.
    """
    supported, why = support
    if not has_neuron:
        choice = False, "no Neuron device"
    elif not supported:
        choice = False, f"the NKI kernel does not run it: {why}"
    else:
        choice = True, f"Neuron device; {why}"
    _log_once(operator, "nki" if choice[0] else "torch", choice[1])
    return choice


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX512-BF16 or AMX); else torch emulates it, slowly."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _select_linear(dtype: torch.dtype, deterministic: bool) -> tuple[Linear, str]:
    if deterministic:
        _warn_unless_deterministic()
        return UpcastLinear(), "deterministic mode: float32 products of padded rows"
    if dtype == torch.float32:
        return UpcastLinear(), "float32 weights"
    if has_native_bfloat16():
        return NativeLinear(), "the CPU multiplies bfloat16"
    return FewRowsNativeLinear(), "the CPU does not multiply bfloat16: upcast beyond a few rows"


@cache
def _warn_unless_deterministic() -> None:
    if not rows_keep_their_bits(UpcastLinear()):
        logger.warning(
            "the maths library of this process gives a row other bits in another batch, so a prefix hit may differ "
            "from a miss in the last bits; MKL obeys MKL_CBWR=AVX512,STRICT (or AVX2,STRICT) only if it is set before "
            "its first use"
        )


@cache
def _log_once(operator: str, implementation: str, reason: str) -> None:
    logger.info("kernel %s: %s (%s)", operator, implementation, reason)
