"""Owns the normalisations of the Qwen hybrid family, in float32 along the last dimension."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, for float32 `x` [..., C]; a zero-centred weight comes with its 1 added."""
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


def l2_norm_(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) in place: the q and k norm of Gated DeltaNet (HF `l2norm`: a sum, eps inside)."""
    return x.mul_(x.square().sum(-1, keepdim=True).add_(eps).rsqrt_())
