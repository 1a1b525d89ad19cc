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
    with pytest.raises(UnsupportedCheckpoint, match="norm_topk_prob = False is not served, only True in a qwen3_5_moe"):
        read_config(write(tmp_path, unnormalised | {"model_type": "qwen3_5_moe_text"}))


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


SWITCHES: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    # Served values, refused values; whatever is null or absent is served.
    "hidden_act": (("silu",), ("gelu", "relu2")),
    "attn_output_gate": ((True,), (False,)),
    "output_gate_type": (("swish", "silu"), ("sigmoid",)),
    "attention_bias": ((False,), (True,)),
    "mlp_bias": ((False,), (True,)),
    "use_sliding_window": ((False,), (True,)),
    "sliding_window": ((), (4096,)),
    "n_group": ((0, 1), (8,)),
    "topk_group": ((0, 1), (4,)),
    "routed_scaling_factor": ((1, 1.0), (2.5,)),
    "embedding_multiplier": ((1.0,), (12.0,)),
    "residual_multiplier": ((1.0,), (0.22,)),
    "logits_scaling": ((1.0,), (8.0,)),
    "attn_logit_softcapping": ((), (50.0,)),
    "final_logit_softcapping": ((), (30.0,)),
    "norm_topk_prob": ((True,), (False,)),
    "scoring_func": (("softmax", "sigmoid"), ("noaux_tc",)),
}


@pytest.mark.parametrize("field", SWITCHES)
def test_a_switch_that_changes_the_result_is_served_or_refused(tmp_path: Path, field: str) -> None:
    served, refused = SWITCHES[field]
    text = DENSE | EXPERTS | {"model_type": "qwen3_5_moe_text"}
    for value in (None, *served):
        read_config(write(tmp_path, text | {field: value}))
    for value in refused:
        with pytest.raises(UnsupportedCheckpoint, match=rf"config\.json: {field} = {value!r} is not served"):
            read_config(write(tmp_path, text | {field: value}))
        nested = {"model_type": "qwen3_5_moe", "text_config": text | {field: value}}
        with pytest.raises(UnsupportedCheckpoint, match=rf"config\.json: text_config\.{field} = {value!r} is not"):
            read_config(write(tmp_path, nested))


@pytest.mark.parametrize("field", SWITCHES.keys() - {"norm_topk_prob", "scoring_func"})
def test_a_refused_switch_at_the_top_level_of_a_nested_config_is_refused(tmp_path: Path, field: str) -> None:
    for value in SWITCHES[field][1]:
        with pytest.raises(UnsupportedCheckpoint, match=rf"config\.json: {field} = {value!r} is not served"):
            read_config(write(tmp_path, {"model_type": "qwen3_5", "text_config": DENSE, field: value}))


def test_a_window_that_is_switched_off_does_no_harm(tmp_path: Path) -> None:
    read_config(write(tmp_path, DENSE | {"sliding_window": 4096, "use_sliding_window": False}))


def test_settings_of_training_and_of_generation_do_not_matter(tmp_path: Path) -> None:
    idle = {
        "use_cache": False,
        "attention_dropout": 0.1,
        "initializer_range": 0.5,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
        "mtp_num_hidden_layers": 1,
        "mamba_ssm_dtype": "float32",
        "pad_token_id": 3,
    }
    plain = read_config(write(tmp_path, DENSE))
    assert read_config(write(tmp_path, DENSE | idle)) == plain


def test_the_rms_norm_eps_is_that_of_the_text_model(tmp_path: Path) -> None:
    nested = {"model_type": "qwen3_5", "rms_norm_eps": 0.5, "text_config": DENSE | {"rms_norm_eps": 1e-5}}
    assert read_config(write(tmp_path, nested)).rms_norm_eps == 1e-5
    assert read_config(write(tmp_path, DENSE)).rms_norm_eps == 1e-6


@pytest.mark.parametrize("inner", ["qwen3_next", "qwen3_5_moe_text", "llama"])
def test_a_text_model_of_another_type_is_refused(tmp_path: Path, inner: str) -> None:
    nested = {"model_type": "qwen3_5", "text_config": DENSE | {"model_type": inner}}
    with pytest.raises(UnsupportedCheckpoint, match=rf"text_config\.model_type '{inner}' is not served in a qwen3_5, "):
        read_config(write(tmp_path, nested))


LINEAR = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")


@pytest.mark.parametrize("field", ["head_dim", *(f"linear_{name}" for name in LINEAR)])
def test_a_size_that_transformers_would_guess_is_asked_for(tmp_path: Path, field: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} is missing"):
        read_config(write(tmp_path, {name: value for name, value in DENSE.items() if name != field}))


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
