"""cos and sin are those of transformers, scaled or not."""

from typing import Any

import pytest
import torch
from transformers.models import qwen3_5, qwen3_next

from warmstate.models.rope_config import RopeConfig, YarnScaling
from warmstate.models.rotary import Rotary

YARN = YarnScaling(4.0, 262144, 0.1386 + 1.0, 32.0, 1.0, True)
POSITIONS = torch.tensor([0, 1, 63, 4095, 262143, 262144, 1048575])


def transformers_tables(rope: RopeConfig, next_family: bool) -> Any:
    stated: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta, "partial_rotary_factor": 0.25}
    if rope.yarn is not None:
        stated |= {
            "rope_type": "yarn",
            "factor": rope.yarn.factor,
            "original_max_position_embeddings": rope.yarn.trained_length,
            "attention_factor": rope.yarn.attention_factor,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
            "truncate": rope.yarn.truncate,
        }
    sizes: Any = {"head_dim": 4 * rope.rotary_dim, "max_position_embeddings": 1 << 20, "rope_parameters": stated}
    if next_family:
        module: Any = qwen3_next.modeling_qwen3_next.Qwen3NextRotaryEmbedding(qwen3_next.Qwen3NextConfig(**sizes))
        return module(torch.empty(0), POSITIONS[None])
    module = qwen3_5.modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(qwen3_5.Qwen3_5TextConfig(**sizes))
    return module(torch.empty(0), POSITIONS[None, None])


@pytest.mark.parametrize("next_family", [True, False])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(1e7, 64),
        RopeConfig(1e7, 64, YARN),
        RopeConfig(1e4, 32, YarnScaling(8.0, 4096, 1.0, 32.0, 1.0, False)),
        RopeConfig(1e6, 16, YarnScaling(2.5, 32768, 1.25, 4.0, 2.0, True)),
        # The ramp is one pair wide, or none.
        RopeConfig(1e7, 4, YarnScaling(4.0, 100, 1.0, 32.0, 1.0, True)),
        RopeConfig(1e7, 64, YarnScaling(1.0, 1000, 1.0, 1.0001, 1.0, False)),
    ],
)
def test_tables_are_those_of_transformers(rope: RopeConfig, next_family: bool) -> None:
    expected = [table[0, :, : rope.rotary_dim // 2] for table in transformers_tables(rope, next_family)]
    for ours, theirs in zip(Rotary(rope).tables(POSITIONS), expected, strict=True):
        torch.testing.assert_close(ours[:, 0], theirs, atol=1e-6, rtol=0)


def test_yarn_leaves_fast_pairs_and_slows_the_slow_ones_by_its_factor() -> None:
    """By hand: pair i turns 262144 / (2 pi 1e7 ** (i / 32)) times, more than 32 to i = 14, less than 1 from 22 on."""
    plain, scaled = (
        Rotary(RopeConfig(1e7, 64, yarn)).tables(torch.tensor([1]))[1].flatten().double() for yarn in (None, YARN)
    )
    slowed = plain.asin() / (scaled / YARN.attention_factor).asin()
    torch.testing.assert_close(slowed[:15], torch.ones(15).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(slowed[22:], torch.full((10,), 4.0).double(), atol=1e-4, rtol=0)
    assert slowed[14:23].diff().gt(0.01).all()
