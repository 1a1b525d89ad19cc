"""Weights as the model gets them, against the modules transformers built from the same files."""

from typing import Any

import pytest
import torch

from warmstate.models.config import read_config
from warmstate.models.loading import load_weights
from warmstate.models.ranks import RankSlice

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_what_transformers_wrote(hf_checkpoint: Any, family: str) -> None:
    path, model = hf_checkpoint(family)
    config = read_config(path)
    weights = dict(load_weights(path, config, RankSlice(), torch.float32))
    body = getattr(model.model, "language_model", model.model)
    assert torch.equal(weights[None]["embed"], body.embed_tokens.weight)
    assert torch.equal(weights[None]["final_norm"], body.norm.weight + 1)
    assert torch.equal(weights[None]["lm_head"], model.lm_head.weight)
    for i, layer in enumerate(body.layers):
        assert torch.equal(weights[i]["input_layernorm"], layer.input_layernorm.weight + 1)
