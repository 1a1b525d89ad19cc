"""Owns the causal depthwise convolution over a ragged batch. Knows no slot and no position."""

import torch

from warmstate.kernels.pointwise_torch import Pointwise


def causal_conv(padded: torch.Tensor, taps: torch.Tensor, pointwise: Pointwise) -> torch.Tensor:
    """silu(sum_j taps[j] * x[t - K + 1 + j]) per channel.

    `padded` [P, C] float32 holds, for each segment, the K - 1 inputs before it and then its own; `taps` [K, C] float32.
    Returns [P - K + 1, C]: row i is the output of the token at `padded` row i + K - 1, so the K - 1 rows that straddle
    two segments mean nothing and are for the caller to skip.
    """
    num_rows = padded.shape[0] - taps.shape[0] + 1
    total = padded[:num_rows] * taps[0]
    for tap in range(1, taps.shape[0]):
        pointwise.add_product_(total, padded[tap : tap + num_rows], taps[tap])
    return pointwise.silu_(total)
