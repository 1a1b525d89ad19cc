"""The dialects of real exports: prefixes, projection and expert layouts, tensors to skip."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmstate.models.checkpoints.checkpoint import read_index
from warmstate.models.checkpoints.dialects import Dialect, canonical_name, probe_dialect
from warmstate.models.checkpoints.loading import load_weights
from warmstate.models.checkpoints.preflight import preflight
from warmstate.models.config import read_config
from warmstate.models.errors import TensorMismatch, UnsupportedCheckpoint
from warmstate.models.ranks import RankSlice

Tensors = dict[str, torch.Tensor]


def probe(path: Path) -> Dialect:
    return probe_dialect(read_index(path), read_config(path))


def renamed(rename: Callable[[str], str]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[rename(name)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("language_model.", "language_model.lm_head.weight"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_all_four_prefixes_load_the_same_weights(
    demo_checkpoint: Any, edit_tensors: Any, family: str, prefix: str, head: str
) -> None:
    path = demo_checkpoint(family, tie_word_embeddings=False)
    config = read_config(path)
    before = dict(load_weights(path, config, RankSlice(), torch.float32))
    names = {name: prefix + canonical_name(name) for name in read_index(path).tensors}
    names["lm_head.weight"] = head
    edit_tensors(path, renamed(names.__getitem__))
    preflight(path)
    after = dict(load_weights(path, config, RankSlice(), torch.float32))
    for layer, weights in before.items():
        for name, tensor in weights.items():
            assert torch.equal(tensor, after[layer][name]), (layer, name)


@pytest.mark.parametrize(
    ("family", "gdn", "experts"),
    [
        ("qwen3_next", "interleaved", "per_expert"),
        ("qwen3_5", "split", None),
        ("qwen3_5_text", "split", None),
        ("qwen3_5_moe", "split", "fused"),
        ("qwen3_5_moe_text", "split", "fused"),
    ],
)
def test_official_layouts_are_told_from_tensor_names(
    demo_checkpoint: Any, family: str, gdn: str, experts: str | None
) -> None:
    dialect = probe(demo_checkpoint(family))
    assert (dialect.gdn, set(dialect.experts)) == (gdn, {experts})


def test_transformers_writes_qwen35_experts_one_by_one_and_they_are_found(hf_checkpoint: Any) -> None:
    path, _ = hf_checkpoint("qwen3_5_moe_text")
    assert set(probe(path).experts) == {"per_expert"}


def test_a_model_that_begins_with_attention_is_probed_on_its_first_gdn_layer(demo_checkpoint: Any) -> None:
    kinds = ["full_attention", "full_attention", "linear_attention", "linear_attention"]
    assert probe(demo_checkpoint("qwen3_next", layer_types=kinds)).gdn == "interleaved"


def test_mtp_and_vision_are_skipped_with_one_log_line(
    hf_checkpoint: Any, edit_tensors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path, model = hf_checkpoint("qwen3_5")
    edit_tensors(path, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(32, 64)}))
    (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    with caplog.at_level(logging.INFO):
        dialect = preflight(path).dialect
    assert dialect.num_mtp_tensors == 1
    assert dialect.num_vision_tensors == len(list(model.model.visual.parameters()))
    assert len(caplog.records) == 1
    assert "skipping 1 MTP" in caplog.text


def test_a_checkpoint_without_extras_logs_nothing(demo_checkpoint: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        preflight(demo_checkpoint())
    assert not caplog.records


def test_fused_and_split_projections_at_once_are_an_error(demo_checkpoint: Any, edit_tensors: Any) -> None:
    path = demo_checkpoint("qwen3_next")
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(TensorMismatch, match="layer 0 mixes in_proj_qkvz, in_proj_ba with in_proj_qkv"):
        probe(path)


def test_fused_and_single_experts_at_once_are_an_error_naming_the_layer(
    demo_checkpoint: Any, edit_tensors: Any
) -> None:
    path = demo_checkpoint("qwen3_next")
    name = "model.layers.2.mlp.experts.gate_up_proj"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(TensorMismatch, match="layer 2 has fused and per-expert"):
        probe(path)


def test_one_projection_for_everything_is_refused(demo_checkpoint: Any, edit_tensors: Any) -> None:
    path = demo_checkpoint("qwen3_next")

    def change(tensors: Tensors) -> None:
        for part in ("in_proj_qkvz", "in_proj_ba"):
            del tensors[f"model.layers.0.linear_attn.{part}.weight"]
        tensors["model.layers.0.linear_attn.in_proj.weight"] = torch.zeros(1)

    edit_tensors(path, change)
    with pytest.raises(UnsupportedCheckpoint, match=r"in_proj\.weight: one projection for all"):
        probe(path)


def test_one_tensor_under_two_prefixes_is_an_error(demo_checkpoint: Any, edit_tensors: Any) -> None:
    path = demo_checkpoint()
    edit_tensors(path, lambda tensors: tensors.update({"model.language_model.norm.weight": torch.zeros(64)}))
    with pytest.raises(TensorMismatch, match="are the same tensor"):
        probe(path)
