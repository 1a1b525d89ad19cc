"""Tiny checkpoints written by transformers itself, with every weight that decides about state randomised."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models import qwen3_5, qwen3_5_moe, qwen3_next

from warmstate.models.checkpoints.checkpoint import INDEX_NAME
from warmstate.models.checkpoints.expected_tensors import expected_tensors
from warmstate.models.config import read_config
from warmstate.models.demo.demo_checkpoint import FAMILIES, demo_config, demo_dialect, write_demo_checkpoint

HfCheckpoint = Callable[..., tuple[Path, Any]]
DemoCheckpoint = Callable[..., Path]
EditTensors = Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], None]

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def _text_model(family: str, sizes: dict[str, Any]) -> Any:
    if family == "qwen3_next":
        return qwen3_next.Qwen3NextForCausalLM(qwen3_next.Qwen3NextConfig(**sizes))
    if family == "qwen3_5_text":
        return qwen3_5.Qwen3_5ForCausalLM(qwen3_5.Qwen3_5TextConfig(**sizes))
    return qwen3_5_moe.Qwen3_5MoeForCausalLM(qwen3_5_moe.Qwen3_5MoeTextConfig(**sizes))


def _multimodal_model(family: str, sizes: dict[str, Any]) -> Any:
    tie = sizes["tie_word_embeddings"]
    if family == "qwen3_5":
        config = qwen3_5.Qwen3_5Config(text_config=sizes, vision_config=dict(_VISION), tie_word_embeddings=tie)
        return qwen3_5.Qwen3_5ForConditionalGeneration(config)
    config = qwen3_5_moe.Qwen3_5MoeConfig(text_config=sizes, vision_config=dict(_VISION), tie_word_embeddings=tie)
    return qwen3_5_moe.Qwen3_5MoeForConditionalGeneration(config)


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights under which the state matters: slow and fast decays, norms away from their neutral value."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-3.0, 1.0, generator=generator)
        elif name.endswith("dt_bias"):
            weight.uniform_(-2.0, 1.0, generator=generator)
        elif "norm" in name:
            weight.uniform_(-0.5, 0.5, generator=generator)
            if "linear_attn.norm" in name:
                weight.add_(1.0)
        else:
            weight.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)


@pytest.fixture
def hf_checkpoint(tmp_path: Path) -> HfCheckpoint:
    """Makes `(path, model)`: `hf_checkpoint(family, seed=0, dtype=torch.float32, **config overrides)`.

    Families qwen3_next, qwen3_5_text, qwen3_5_moe_text, and the multimodal qwen3_5 and qwen3_5_moe. Overrides go by
    transformers' names; `num_experts=0` makes qwen3_next dense. The model is in eval mode with eager attention.
    """
    made = iter(range(1000))

    def make(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> tuple[Path, Any]:
        moe = family == "qwen3_next" or "moe" in family
        sizes = {**_SIZES, **(_EXPERTS if moe else {}), **overrides}
        transformers.set_seed(seed)
        model = (_multimodal_model if family in ("qwen3_5", "qwen3_5_moe") else _text_model)(family, sizes)
        model.set_attn_implementation("eager")
        _randomise(model, seed)
        path = tmp_path / f"{family}-{next(made)}"
        model = model.to(dtype).eval()
        model.save_pretrained(path)
        return path, model

    return make


@pytest.fixture
def demo_checkpoint(tmp_path: Path) -> DemoCheckpoint:
    """Makes a tiny checkpoint of four layers in one file: `demo_checkpoint(family, **write_demo_checkpoint's)`."""
    made = iter(range(1000))

    def make(family: str = "qwen3_5_text", **options: Any) -> Path:
        path = tmp_path / f"demo-{family}-{next(made)}"
        write_demo_checkpoint(path, family, **{"num_hidden_layers": 4, **options})
        return path

    return make


@pytest.fixture
def edit_tensors() -> EditTensors:
    """Rewrites the tensors of a one-file checkpoint: `edit_tensors(path, change)`, where `change` edits the dict."""

    def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return edit


@pytest.fixture
def hollow_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a bfloat16 checkpoint of demo size "1.2b" whose weights are holes in files: large, and written at once.

    `hollow_checkpoint(family, num_files=1, **config overrides)`; every weight is zero. More than one file have an
    index, and the tensors of each layer are spread over all of them.
    """

    def make(family: str, num_files: int = 1, **overrides: Any) -> Path:
        path = tmp_path / f"hollow-{family}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(demo_config(family, "1.2b", **overrides)))
        config = read_config(path)
        expected = expected_tensors(config, demo_dialect(config, FAMILIES[family]))
        shapes = {name if name == "lm_head.weight" else f"model.{name}": shape for name, shape in expected}
        if num_files == 1:
            _write_hole(path / "model.safetensors", shapes)
            return path
        files = {name: f"shard-{i % num_files}.safetensors" for i, name in enumerate(shapes)}
        for file in set(files.values()):
            _write_hole(path / file, {name: shape for name, shape in shapes.items() if files[name] == file})
        (path / INDEX_NAME).write_text(json.dumps({"weight_map": files}))
        return path

    return make


def _write_hole(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, Any] = {}
    start = 0
    for name, shape in shapes.items():
        stop = start + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, stop)}
        start = stop
    encoded = json.dumps(header).encode()
    with file.open("wb") as weights:
        weights.write(struct.pack("<Q", len(encoded)) + encoded)
        weights.truncate(8 + len(encoded) + start)
