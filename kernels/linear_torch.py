"""Owns x @ weight.T on the CPU, for bfloat16 or float32 weights and float32 activations. Knows no layer."""

from typing import Protocol

import torch
import torch.nn.functional as F

ROW_QUANTUM = 16
"""A row of a float32 product is the same bits at any place of any batch whose rows are a multiple of this (measured:
MKL on AMD's AVX2 and, in its strict mode, on Intel's AVX512 and AVX2; K 16 to 3584, N 1 to 1030, 1 to 3 threads;
`tests/kernels/test_linear.py` repeats it)."""

_MIN_OUTPUTS = 16
"""With 5 to 11 outputs the bits also depend on the number of threads (measured), so fewer outputs are padded."""

_SLAB_ELEMENTS = 1 << 20
"""Weights converted at a time: 4 MiB of float32 stay in the last-level cache until the product has read them."""


class Linear(Protocol):
    """y [M, N] float32 = x [M, K] float32 @ weight [N, K].T. Implementations: the three classes below."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...


class NativeLinear:
    """Products in the dtype of the weight: the fastest where the CPU multiplies that dtype itself.

    Up to `swapped_rows` rows the product is formed as weight @ x.T, and of one row as of two, which keeps it a product
    of matrices. Measured on Sapphire Rapids, 2 threads, weight [7168, 1024], x @ weight.T / weight @ x.T in ms: 1 row
    0.61 / 0.48, 8 rows 0.61 / 0.40, 64 rows 1.30 / 0.66. With more rows turning the result costs what it gains.
    """

    def __init__(self, swapped_rows: int = 64) -> None:
        self._swapped_rows = swapped_rows

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if num_rows > self._swapped_rows:
            return F.linear(x.to(weight.dtype), weight).float()
        columns = x.to(weight.dtype).expand(max(2, num_rows), -1).t()
        product = torch.mm(weight, columns)[:, :num_rows].t()
        return x.new_empty(product.shape).copy_(product)


class UpcastLinear:
    """float32 products of rows padded to `ROW_QUANTUM`; bfloat16 weights are converted slab by slab on the way.

    The product is formed as weight @ x.T: with few rows MKL runs that two to three times as fast as x @ weight.T. The
    slabs depend on the weight alone, so a row's result depends on nothing but the row.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_rows, num_outputs = x.shape[0], weight.shape[0]
        columns = x.new_zeros(x.shape[1], _round_up(num_rows))
        columns[:, :num_rows] = x.t()
        if num_outputs < _MIN_OUTPUTS:
            weight = F.pad(weight, (0, 0, 0, _MIN_OUTPUTS - num_outputs))
        product = self._multiply(weight, columns)
        return product[:num_outputs, :num_rows].t().contiguous()

    def _multiply(self, weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        if weight.dtype == torch.float32:
            return torch.mm(weight, columns)
        num_outputs, width = weight.shape
        product = columns.new_empty(num_outputs, columns.shape[1])
        slab_rows = max(_MIN_OUTPUTS, _SLAB_ELEMENTS // width)
        if self._scratch.numel() < slab_rows * width:
            self._scratch = torch.empty(slab_rows * width)
        for first in range(0, num_outputs, slab_rows):
            # The last slab starts early rather than being short: see `_MIN_OUTPUTS`.
            part = slice(max(0, min(first, num_outputs - slab_rows)), first + slab_rows)
            rows = weight[part]
            slab = self._scratch[: rows.numel()].view(rows.shape).copy_(rows)
            torch.mm(slab, columns, out=product[part])
        return product


def _round_up(num_rows: int) -> int:
    return -(-num_rows // ROW_QUANTUM) * ROW_QUANTUM


class FewRowsNativeLinear:
    """Native for at most `native_rows` rows, upcast above: bfloat16 on a CPU that cannot multiply it.

    Measured on AVX2, 2 threads, weight [7168, 1024], native / upcast in ms: 1 row 1.0 / 2.0, 4 rows 3.6 / 4.0,
    8 rows 7.1 / 4.0, 64 rows 58 / 10, 512 rows 434 / 65.
    """

    def __init__(self, native_rows: int = 4) -> None:
        self._native_rows = native_rows
        self._native = NativeLinear(swapped_rows=0)
        self._upcast = UpcastLinear()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._native(x, weight) if x.shape[0] <= self._native_rows else self._upcast(x, weight)


def rows_keep_their_bits(linear: Linear) -> bool:
    """Whether each row of a product is the same alone and in a batch, on a shape where it is not in MKL's default mode
    on Intel's CPUs."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(300, 1024, generator=generator), torch.randn(1030, 1024, generator=generator)
    batch = linear(x, weight)
    return all(torch.equal(linear(x[i : i + 1], weight)[0], batch[i]) for i in range(0, 300, 60))
