"""config.json in every spelling the family has, and every way it can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from warmstate.models.config import read_config
from warmstate.models.demo.demo_tokenizer import END_OF_TURN, token_id, write_tokenizer
from warmstate.models.errors import CheckpointError, MissingFile, UnsupportedCheckpoint

DENSE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def write(path: Path, content: dict[str, Any], name: str = "config.json") -> Path:
    (path / name).write_text(json.dumps(content))
    return path


def test_a_flat_config_gives_the_sizes(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, DENSE))
    assert (config.num_layers, config.head_dim, config.rope.rotary_dim) == (8, 32, 8)
    assert config.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2
    assert config.sparse_layers == (False,) * 8
    assert config.num_experts == 0


def test_state_shapes_follow_the_layer_types(tmp_path: Path) -> None:
    shapes = read_config(write(tmp_path, DENSE)).state_shapes(torch.bfloat16)
    assert shapes.rec_shape() == (6, 6, 16, 24)
    assert shapes.conv_shape() == (6, 2 * 2 * 16 + 6 * 24, 3)
    assert shapes.kv_shape(64) == (2, 2, 2, 64, 32)
    assert shapes.dtype == torch.bfloat16


def test_a_nested_config_is_read_from_text_config(tmp_path: Path) -> None:
    nested = {"model_type": "qwen3_5", "text_config": DENSE, "vision_config": {"hidden_size": 7}}
    config = read_config(write(tmp_path, nested))
    assert config.model_type == "qwen3_5"
    assert config.hidden_size == 64


def test_listed_layer_types_win_over_the_interval(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    changed = {"num_hidden_layers": 4, "layer_types": kinds, "full_attention_interval": 2}
    assert read_config(write(tmp_path, DENSE | changed)).layer_types == tuple(kinds)


def test_the_interval_decides_where_no_list_is_given(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, DENSE | {"full_attention_interval": 2}))
    assert config.layer_types == ("linear_attention", "full_attention") * 4


def test_routing_weights_are_normalised_where_the_config_is_silent(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, DENSE | EXPERTS | {"model_type": "qwen3_5_moe_text"}))
    assert config.norm_topk_prob
    assert config.router_scoring == "softmax"


def test_only_qwen3_next_can_switch_normalisation_off(tmp_path: Path) -> None:
    unnormalised = DENSE | EXPERTS | {"norm_topk_prob": False}
    assert not read_config(write(tmp_path, unnormalised | {"model_type": "qwen3_next"})).norm_topk_prob
    assert read_config(write(tmp_path, unnormalised | {"model_type": "qwen3_5_moe_text"})).norm_topk_prob


def test_sigmoid_routing_needs_an_explicit_scoring_func(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, DENSE | EXPERTS | {"scoring_func": "sigmoid"}))
    assert config.router_scoring == "sigmoid"
    with pytest.raises(UnsupportedCheckpoint, match="scoring_func = 'noaux'"):
        read_config(write(tmp_path, DENSE | EXPERTS | {"scoring_func": "noaux"}))


def test_dense_layers_among_sparse_ones_are_found(tmp_path: Path) -> None:
    mixed = DENSE | EXPERTS | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "model_type": "qwen3_next"}
    config = read_config(write(tmp_path, mixed))
    assert config.sparse_layers == (False, False, False, True, False, True, False, True)
    assert config.intermediate_size == 128


def test_a_fully_sparse_model_needs_no_intermediate_size(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, DENSE | EXPERTS | {"intermediate_size": None}))
    assert config.moe_intermediate_size == 16


@pytest.mark.parametrize(("text", "top", "tied"), [(True, None, True), (None, True, True), (False, None, False)])
def test_the_tie_flag_is_found_at_either_level(tmp_path: Path, text: bool, top: bool, tied: bool) -> None:
    nested = {"model_type": "qwen3_5", "tie_word_embeddings": top}
    config = read_config(write(tmp_path, nested | {"text_config": DENSE | {"tie_word_embeddings": text}}))
    assert config.tie_word_embeddings is tied


def test_end_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 4096)
    write(tmp_path, {"eos_token_id": [5, 6]}, "generation_config.json")
    nested = {"model_type": "qwen3_5", "eos_token_id": 7, "text_config": DENSE | {"eos_token_id": 8}}
    assert read_config(write(tmp_path, nested)).eos_token_ids == {5, 6, 7, 8, token_id(END_OF_TURN)}


def test_an_added_token_as_object_names_the_end_token_too(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 4096)
    write(tmp_path, {"eos_token": {"content": "<|endoftext|>", "special": True}}, "tokenizer_config.json")
    assert read_config(write(tmp_path, DENSE)).eos_token_ids == {token_id("<|endoftext|>")}


def test_an_end_token_unknown_to_the_tokenizer_is_an_error(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 4096)
    write(tmp_path, {"eos_token": "<|bye|>"}, "tokenizer_config.json")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: eos_token '<\|bye\|>'"):
        read_config(write(tmp_path, DENSE))


def test_an_unknown_model_type_lists_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"'llama' is not served; supported: qwen3_next, qwen3_5, .*"):
        read_config(write(tmp_path, DENSE | {"model_type": "llama"}))


@pytest.mark.parametrize(
    ("field", "value"), [("attn_output_gate", False), ("hidden_act", "gelu"), ("attention_bias", True)]
)
def test_switches_that_are_not_served_are_refused(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=f"{field} = {value!r}"):
        read_config(write(tmp_path, DENSE | {field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", "64"),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("hidden_size", 64.0),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 3),
        ("linear_num_value_heads", 5),
        ("rms_norm_eps", -1),
        ("rope_theta", "big"),
        ("partial_rotary_factor", 4),
        ("layer_types", ["linear_attention"] * 8),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", "linear_attention"),
        ("layer_types", ["sliding_attention"] * 8),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", 320),
        ("eos_token_id", [1, "2"]),
        ("num_experts", -1),
        ("rope_parameters", 3),
    ],
)
def test_a_malformed_field_is_named_with_its_file(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {field}"):
        read_config(write(tmp_path, DENSE | {field: value}))


def test_more_experts_per_token_than_experts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok: expected an integer from 1 to 8, found 9"):
        read_config(write(tmp_path, DENSE | EXPERTS | {"num_experts_per_tok": 9}))


@pytest.mark.parametrize("content", ["{", "[]", "3", "", "\xff", '{"a": ' + "[" * 100_000])
def test_broken_json_is_one_error_naming_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        read_config(tmp_path)


def test_a_missing_config_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"config\.json"):
        read_config(tmp_path)
