"""Linears agree with float64, and rows of the upcast one are the same bits in any batch."""

import pytest
import torch

from warmstate.kernels.linear_torch import FewRowsNativeLinear, NativeLinear, UpcastLinear, rows_keep_their_bits
from warmstate.kernels.select import select_kernels


def _case(rows: int, outputs: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + outputs)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.randn(outputs, width, generator=generator).to(dtype)


@pytest.mark.parametrize("linear", [NativeLinear(), UpcastLinear(), FewRowsNativeLinear()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_linear_is_the_product_with_the_transposed_weight(linear: object, dtype: torch.dtype) -> None:
    for rows, outputs, width in ((1, 1, 32), (3, 7, 33), (5, 40, 64), (64, 9, 70), (65, 100, 1000), (17, 5000, 300)):
        x, weight = _case(rows, outputs, width, dtype)
        exact = x.double() @ weight.double().t()
        scale = x.double().abs() @ weight.double().abs().t()
        y = linear(x, weight)  # type: ignore[operator]
        assert y.dtype == torch.float32
        assert y.is_contiguous()
        bound = (2**-7 if dtype == torch.bfloat16 else 1e-6) * scale + 1e-6
        assert ((y - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_the_upcast_linear_is_the_same_bits_in_any_batch_and_with_any_threads(dtype: torch.dtype) -> None:
    linear = UpcastLinear()
    for outputs, width in ((1, 32), (6, 32), (11, 36), (16, 128), (97, 33), (1030, 1024)):
        x, weight = _case(300, outputs, width, dtype)
        torch.set_num_threads(1)
        alone = torch.cat([linear(row[None], weight) for row in x[:40]])
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for first, last in ((0, 1), (0, 12), (3, 40), (0, 300), (7, 290)):
                batch = linear(x[first:last], weight)
                expected = alone[first:last]
                assert torch.equal(batch[: len(expected)], expected)


def test_deterministic_mode_never_selects_a_kernel_whose_rows_depend_on_the_batch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(select_kernels(dtype, deterministic=True).linear, UpcastLinear)


def test_a_library_whose_rows_depend_on_the_batch_is_noticed() -> None:
    def depends_on_the_batch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // (2 if len(x) > 1 else 1)
        return x[:, :half] @ weight[:, :half].t() + x[:, half:] @ weight[:, half:].t()

    assert rows_keep_their_bits(UpcastLinear())
    assert not rows_keep_their_bits(depends_on_the_batch)
