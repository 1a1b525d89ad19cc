"""Owns partial rotary position embedding. Text only: the three mRoPE axes of Qwen3.5 then coincide."""

import math

import torch

from warmstate.models.rope_config import RopeConfig, YarnScaling


class Rotary:
    """Rotates the first `rotary_dim` of each head in pairs (i, i + rotary_dim / 2)."""

    def __init__(self, rope: RopeConfig) -> None:
        exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
        self._inverse_frequencies = 1.0 / rope.theta**exponents
        self._scale = 1.0
        if rope.yarn is not None:
            kept = _share_kept(rope, rope.yarn)
            stretched = 1.0 / (rope.yarn.factor * rope.theta**exponents)
            self._inverse_frequencies = stretched * (1 - kept) + self._inverse_frequencies * kept
            self._scale = rope.yarn.attention_factor

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, rotary_dim / 2] float32 of int64 `positions` [T], times YaRN's attention factor.

        The angle is rounded to float32 as transformers does; cos and sin are taken in float64 and rounded, so that the
        last bit does not depend on the place in the batch.
        """
        angles = (positions.float().unsqueeze(-1) * self._inverse_frequencies).double().unsqueeze(1)
        return angles.cos().mul_(self._scale).float(), angles.sin().mul_(self._scale).float()


def _share_kept(rope: RopeConfig, yarn: YarnScaling) -> torch.Tensor:
    """How much of each pair's own frequency stays [rotary_dim / 2] float32: 1 for the fast ones, 0 for the slow."""

    def pair_that_turns(times: float) -> float:
        turns = math.log(yarn.trained_length / (times * 2 * math.pi))
        return rope.rotary_dim * turns / (2 * math.log(rope.theta))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, rope.rotary_dim - 1.0)
    # Where both are the same pair, the ramp is a step.
    width = last - first or 0.001
    return 1 - ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates `x` [T, heads, head_dim] float32 in place."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = first * cos - second * sin
    second.mul_(cos).add_(first * sin)
    first.copy_(rotated)
