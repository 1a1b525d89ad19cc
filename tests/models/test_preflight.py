"""What preflight refuses, and that its one error names file and tensor. It never reads a weight."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from warmstate.models.checkpoints.preflight import preflight
from warmstate.models.errors import CheckpointError, MissingFile, TensorMismatch, UnsupportedCheckpoint

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
GATE = "model.layers.0.mlp.gate_proj.weight"


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_checkpoint_is_summed_up(demo_checkpoint: Any, family: str) -> None:
    path = demo_checkpoint(family)
    summary = preflight(path)
    file_bytes = (path / "model.safetensors").stat().st_size
    assert 0 < file_bytes - summary.total_bytes < 100_000
    assert set(summary.bytes_by_dtype) == {"BF16", "F32"}
    assert summary.loaded_bytes(4) == 4 * summary.num_parameters


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_each_tensor_is_needed(demo_checkpoint: Any, edit_tensors: Any, family: str) -> None:
    path = demo_checkpoint(family)
    needed = [
        "embed_tokens.weight",
        "norm.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.linear_attn.A_log",
        "layers.3.self_attn.q_norm.weight",
        {
            "qwen3_next": "layers.2.mlp.experts.7.down_proj.weight",
            "qwen3_5_text": "layers.2.mlp.up_proj.weight",
            "qwen3_5_moe_text": "layers.2.mlp.experts.down_proj",
        }[family],
    ]
    for name in needed:
        removed: dict[str, torch.Tensor] = {}
        edit_tensors(path, lambda tensors, n=name, kept=removed: kept.update({n: tensors.pop(f"model.{n}")}))
        with pytest.raises(TensorMismatch, match=f"tensor {name} is missing"):
            preflight(path)
        edit_tensors(path, lambda tensors, n=name, kept=removed: tensors.update({f"model.{n}": kept[n]}))
    preflight(path)


def test_an_untied_model_needs_its_head(demo_checkpoint: Any, edit_tensors: Any) -> None:
    path = demo_checkpoint(tie_word_embeddings=False)
    edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(TensorMismatch, match=r"tensor lm_head\.weight is missing"):
        preflight(path)


@pytest.mark.parametrize("with_head", [False, True])
def test_a_tied_model_may_have_a_head_or_not(demo_checkpoint: Any, edit_tensors: Any, with_head: bool) -> None:
    path = demo_checkpoint(tie_word_embeddings=True)
    if with_head:
        edit_tensors(
            path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
        )
    assert preflight(path).dialect.has_lm_head is with_head


def test_an_unexpected_tensor_is_named_with_its_file(demo_checkpoint: Any, edit_tensors: Any) -> None:
    path = demo_checkpoint()
    edit_tensors(path, lambda tensors: tensors.update({"model.layers.0.mlp.extra.weight": torch.zeros(1)}))
    expected = r"model\.safetensors: tensor model\.layers\.0\.mlp\.extra\.weight is unexpected"
    with pytest.raises(TensorMismatch, match=expected):
        preflight(path)


def test_a_wrong_shape_is_named_with_both_shapes(demo_checkpoint: Any, edit_tensors: Any) -> None:
    path = demo_checkpoint()
    edit_tensors(path, lambda tensors: tensors.update({GATE: torch.zeros(127, 64, dtype=torch.bfloat16)}))
    with pytest.raises(TensorMismatch, match=rf"model\.safetensors: tensor {GATE} has shape \[127, 64\].*\[128, 64\]"):
        preflight(path)


def test_a_config_of_another_model_is_told_by_a_shape(demo_checkpoint: Any) -> None:
    path = demo_checkpoint()
    edit_config(path, linear_num_value_heads=2)
    with pytest.raises(TensorMismatch, match=r"config\.json asks for"):
        preflight(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_a_dtype_that_is_no_weight_is_named(demo_checkpoint: Any, edit_tensors: Any, dtype: torch.dtype) -> None:
    path = demo_checkpoint()
    edit_tensors(path, lambda tensors: tensors.update({GATE: torch.zeros(128, 64).to(dtype)}))
    with pytest.raises(UnsupportedCheckpoint, match=rf"model\.safetensors: tensor {GATE} has dtype"):
        preflight(path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_files_may_mix_the_served_dtypes(demo_checkpoint: Any, edit_tensors: Any, dtype: torch.dtype) -> None:
    path = demo_checkpoint()
    edit_tensors(path, lambda tensors: tensors.update({GATE: torch.zeros(128, 64, dtype=dtype)}))
    preflight(path)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt MIXED_PRECISION"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "compressed-tensors nvfp4"),
        ({"quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
    ],
)
def test_a_quantised_config_is_refused_before_any_weight_file(
    demo_checkpoint: Any, config: dict[str, Any], method: str
) -> None:
    path = demo_checkpoint()
    edit_config(path, quantization_config=config)
    (path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedCheckpoint, match=f"quantisation {method}.*is not supported; supported: "):
        preflight(path)


@pytest.mark.parametrize("field", ["quantization_config", "quantization", "compression_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantisation_is_found_under_each_name_and_at_each_level(
    demo_checkpoint: Any, field: str, nested: bool
) -> None:
    path = demo_checkpoint("qwen3_5")
    text = json.loads((path / "config.json").read_text())["text_config"]
    quantised = {field: {"quant_method": "fp8"}}
    edit_config(path, **({"text_config": text | quantised} if nested else quantised))
    with pytest.raises(UnsupportedCheckpoint, match=rf"quantisation fp8 \(found config\.json: {field}\)"):
        preflight(path)


def test_a_legacy_quantisation_file_is_refused(demo_checkpoint: Any) -> None:
    path = demo_checkpoint()
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(UnsupportedCheckpoint, match=r"NVFP4 \(found hf_quant_config\.json\)"):
        preflight(path)


@pytest.mark.parametrize(
    ("suffix", "method"),
    [
        ("weight_scale_inv", "FP8 block"),
        ("weight_scale_2", "NVFP4"),
        ("weight_packed", "compressed-tensors"),
        ("qweight", "GPTQ or AWQ"),
        ("weight.absmax", "bitsandbytes"),
        ("scales", "MLX"),
        ("k_scale", "FP8 KV"),
    ],
)
def test_quantised_tensors_are_refused_whatever_the_config_says(
    demo_checkpoint: Any, edit_tensors: Any, suffix: str, method: str
) -> None:
    path = demo_checkpoint()
    name = f"model.layers.1.mlp.up_proj.{suffix}"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(UnsupportedCheckpoint, match=rf"{method}.*\(found tensor {name} in model\.safetensors\)"):
        preflight(path)


def test_a_missing_tokenizer_is_named(demo_checkpoint: Any) -> None:
    path = demo_checkpoint()
    (path / "tokenizer.json").unlink()
    with pytest.raises(MissingFile, match=r"tokenizer\.json: no such file"):
        preflight(path)


@pytest.mark.parametrize("content", ['{"model": {}}', '{"model": {"vocab": {"a": "b"}}}', '{"added_tokens": 3}', "{}"])
def test_a_broken_tokenizer_is_named(demo_checkpoint: Any, content: str) -> None:
    path = demo_checkpoint()
    (path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        preflight(path)


def test_a_token_without_an_embedding_row_is_an_error(demo_checkpoint: Any) -> None:
    path = demo_checkpoint()
    (path / "tokenizer_config.json").unlink()
    (path / "tokenizer.json").write_text(
        '{"model": {"vocab": {"a": 5}}, "added_tokens": [{"content": "b", "id": 320}]}'
    )
    with pytest.raises(CheckpointError, match="token 'b' has id 320, but vocab_size is 320"):
        preflight(path)


@pytest.mark.parametrize("with_base", [True, False])
def test_an_adapter_is_refused_with_its_base_model_or_alone(demo_checkpoint: Any, with_base: bool) -> None:
    """transformers would load both; the base model alone is another model."""
    path = demo_checkpoint()
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if not with_base:
        (path / "config.json").unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"adapter_config\.json: an adapter .* merge it"):
        preflight(path)


def test_a_path_that_is_no_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="no such directory"):
        preflight(tmp_path / "nowhere")
