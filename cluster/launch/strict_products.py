"""Owns that MKL computes a float32 product in an order that does not depend on what else is multiplied with it.

On Intel's CPUs MKL chooses how it cuts a product along the sum by the number of columns and threads; its strict
conditional numerical reproducibility (environment variable MKL_CBWR, Intel oneMKL developer guide, "Obtaining
Numerically Reproducible Results") takes one order for each. On AMD's it was measured not to be needed.
Knows no product.
"""

import os
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")


def ask_for_strict_products() -> None:
    """To be called before MKL's first use, when it reads its environment. A setting of the user's own stays."""
    if _is_intel():
        instructions = "AVX512" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "AVX2"
        os.environ.setdefault("MKL_CBWR", f"{instructions},STRICT")


def _is_intel() -> bool:
    return _CPU_INFO.exists() and "GenuineIntel" in _CPU_INFO.read_text(errors="replace")
