"""The ragged causal convolution equals torch's depthwise convolution of each segment."""

import pytest
import torch
import torch.nn.functional as F

from warmstate.kernels.causal_conv_torch import causal_conv
from warmstate.kernels.pointwise_torch import ExactPointwise, FusedPointwise, Pointwise


@pytest.mark.parametrize("pointwise", [ExactPointwise(), FusedPointwise()])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_each_segment_is_convolved_with_its_own_carry(pointwise: Pointwise, taps: int) -> None:
    generator = torch.Generator().manual_seed(taps)
    weight = torch.randn(taps, 5, generator=generator)
    segments = [torch.randn(taps - 1 + count, 5, generator=generator) for count in (1, 64, 2, 127)]
    outputs = causal_conv(torch.cat(segments), weight, pointwise)
    first = 0
    for segment in segments:
        count = len(segment) - taps + 1
        expected = F.silu(F.conv1d(segment.t()[None], weight.t()[:, None], groups=5))[0].t()
        torch.testing.assert_close(outputs[first : first + count], expected)
        first += len(segment)


def test_what_lies_in_one_segment_never_reaches_another() -> None:
    clean = torch.randn(3 + 10, 4, generator=torch.Generator().manual_seed(0))
    poison = torch.full((3 + 7, 4), float("nan"))
    taps = torch.ones(4, 4)
    outputs = causal_conv(torch.cat((poison, clean, poison)), taps, FusedPointwise())
    assert torch.equal(outputs[10:20], causal_conv(clean, taps, FusedPointwise()))
