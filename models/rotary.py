"""Owns partial rotary position embedding. Text only: the three mRoPE axes of Qwen3.5 then coincide."""

import torch


class Rotary:
    """Rotates the first `rotary_dim` of each head in pairs (i, i + rotary_dim / 2)."""

    def __init__(self, rotary_dim: int, theta: float) -> None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
        self._inverse_frequencies = 1.0 / theta**exponents

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, rotary_dim / 2] float32 of int64 `positions` [T].

        The angle is rounded to float32 as transformers does; cos and sin are taken in float64 and rounded, so that the
        last bit does not depend on the place in the batch.
        """
        angles = (positions.float().unsqueeze(-1) * self._inverse_frequencies).double().unsqueeze(1)
        return angles.cos().float(), angles.sin().float()


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates `x` [T, heads, head_dim] float32 in place."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = first * cos - second * sin
    second.mul_(cos).add_(first * sin)
    first.copy_(rotated)
