"""Demo checkpoints: real format, loadable by transformers, reproducible, and with state that matters."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from warmstate.models.checkpoints.checkpoint import INDEX_NAME, read_index
from warmstate.models.checkpoints.preflight import preflight
from warmstate.models.checkpoints.shard_writer import write_shards
from warmstate.models.config import read_config
from warmstate.models.demo.demo_checkpoint import FAMILIES, SIZES, demo_config, write_demo_checkpoint
from warmstate.models.errors import CheckpointError

PROMPT = torch.arange(32, 96)[None]


def transformers_model(path: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_transformers_loads_every_family_and_computes_finite_logits(demo_checkpoint: Any, family: str) -> None:
    logits = transformers_model(demo_checkpoint(family))(PROMPT).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.5


@torch.no_grad()
def test_tokens_far_back_change_the_logits_through_the_state(demo_checkpoint: Any) -> None:
    """With attention never reaching back (its output zeroed), only the recurrent state can carry the first token."""
    model = transformers_model(demo_checkpoint())
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.o_proj.weight.zero_()
    changed = PROMPT.clone()
    changed[0, 0] = 120
    difference = (model(PROMPT).logits - model(changed).logits)[0, -1].abs().max()
    assert difference > 1e-3


def test_the_same_arguments_give_the_same_bytes(demo_checkpoint: Any) -> None:
    one, other, third = demo_checkpoint(seed=3), demo_checkpoint(seed=3), demo_checkpoint(seed=4)
    for file in sorted(file.name for file in one.iterdir()):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    assert (one / "model.safetensors").read_bytes() != (third / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matrices_are_in_the_asked_for_dtype(demo_checkpoint: Any, dtype: torch.dtype) -> None:
    tensors = load_file(demo_checkpoint(dtype=dtype) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values() if tensor.ndim > 1} == {dtype}


def test_overrides_replace_fields_of_the_text_config(demo_checkpoint: Any) -> None:
    config = preflight(demo_checkpoint("qwen3_5", linear_num_value_heads=6, tie_word_embeddings=False)).config
    assert config.num_v_heads == 6
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_size_has_a_valid_config(tmp_path: Path, family: str, size: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(demo_config(family, size)))
    config = read_config(tmp_path)
    assert config.model_type == family
    assert config.max_position_embeddings == 262_144
    assert any(config.sparse_layers) is FAMILIES[family].moe


def test_a_large_checkpoint_is_cut_into_indexed_shards(demo_checkpoint: Any, tmp_path: Path) -> None:
    path = demo_checkpoint()
    whole = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    write_shards(path, iter(whole.items()), max_shard_bytes=100_000)
    index = read_index(path)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert [shard.name for shard in index.shards] == names
    assert preflight(path).total_bytes == json.loads((path / INDEX_NAME).read_text())["metadata"]["total_size"]
    for name, tensor in whole.items():
        assert torch.equal(load_file(path / index.tensors[name].file)[name], tensor)


def test_a_failure_halfway_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hidden_size"):
        write_demo_checkpoint(tmp_path / "demo", hidden_size=0)
    assert os.listdir(tmp_path) == []


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        write_demo_checkpoint(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    write_demo_checkpoint(tmp_path / "a" / "b", num_hidden_layers=4)
    (tmp_path / "empty").mkdir()
    write_demo_checkpoint(tmp_path / "empty", num_hidden_layers=4)
    assert (tmp_path / "empty" / "config.json").exists()


@pytest.mark.parametrize(("family", "size"), [("llama", "tiny"), ("qwen3_next", "huge")])
def test_unknown_names_list_what_there_is(tmp_path: Path, family: str, size: str) -> None:
    with pytest.raises(ValueError, match=r"qwen3_next.*tiny"):
        write_demo_checkpoint(tmp_path / "demo", family, size)


@torch.no_grad()
def test_the_demo_model_answers_mostly_in_readable_characters(demo_checkpoint: Any) -> None:
    path = demo_checkpoint(num_hidden_layers=8)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    probabilities = transformers_model(path)(PROMPT).logits[0].softmax(-1)
    readable = [token for token in range(tokenizer.vocab_size) if 0x20 <= token < 0x7F]
    assert probabilities[:, readable].sum(-1).mean() > 0.7
