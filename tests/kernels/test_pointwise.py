"""Both forms of the activations agree with float64; the exact form is the same bits at every position."""

import pytest
import torch
import torch.nn.functional as F

from warmstate.kernels.pointwise_torch import ExactPointwise, FusedPointwise, Pointwise


@pytest.mark.parametrize("pointwise", [ExactPointwise(), FusedPointwise()])
def test_activations_agree_with_float64(pointwise: Pointwise) -> None:
    x = torch.linspace(-100, 100, 4001)
    exact = x.double()
    for ours, theirs in (
        (pointwise.sigmoid(x), torch.sigmoid(exact)),
        (pointwise.silu_(x.clone()), F.silu(exact)),
        (pointwise.softplus(x), F.softplus(exact)),
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_exact_form_gives_a_value_the_same_bits_wherever_it_lies(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    pointwise = ExactPointwise()
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(0))
    for function in (pointwise.sigmoid, lambda y: pointwise.silu_(y.clone()), pointwise.softplus):
        whole = function(x)
        for first, last in ((0, 1), (5, 8), (0, 17), (13, 40_000), (1, 65_537)):
            assert torch.equal(function(x[first:last].clone()), whole[first:last])
