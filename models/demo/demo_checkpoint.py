"""Owns demo checkpoints: seeded random weights of the real architecture in the real file format, official layouts."""

import errno
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warmstate.models.checkpoints.dialects import Dialect, ExpertLayout
from warmstate.models.checkpoints.expected_tensors import expected_tensors
from warmstate.models.checkpoints.shard_writer import write_shards
from warmstate.models.config import ModelConfig, read_config
from warmstate.models.demo.demo_tokenizer import END_OF_TEXT, END_OF_TURN, num_tokens, token_id, write_tokenizer

MAX_SHARD_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class DemoSize:
    """Sizes of a demo model. Dense families leave the expert fields unused; `vocab_size` None fits the tokenizer."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    intermediate_size: int
    num_experts: int = 8
    num_experts_per_token: int = 2
    moe_intermediate_size: int = 32
    vocab_size: int | None = None


SIZES = {
    "tiny": DemoSize(64, 8, 4, 2, 32, 2, 4, 32, 32, 128),
    "small": DemoSize(256, 12, 8, 2, 64, 4, 8, 64, 64, 768, 16, 4, 128),
    "0.8b": DemoSize(1024, 24, 8, 2, 256, 16, 16, 128, 128, 3584, 64, 8, 512, 248_320),
    "1.2b": DemoSize(1024, 8, 8, 2, 256, 8, 16, 128, 128, 2816, 64, 8, 512, 151_936),
}
"""Sizes by name. "0.8b" is the dense Qwen3.5-0.8B, "1.2b" a mixture of experts that fits a laptop."""


@dataclass(frozen=True, slots=True)
class DemoFamily:
    """How the official checkpoints of a model type are laid out."""

    architecture: str
    prefix: str
    moe: bool
    nested: bool
    interleaved: bool = False


FAMILIES = {
    "qwen3_next": DemoFamily("Qwen3NextForCausalLM", "model.", moe=True, nested=False, interleaved=True),
    "qwen3_5": DemoFamily("Qwen3_5ForConditionalGeneration", "model.language_model.", moe=False, nested=True),
    "qwen3_5_text": DemoFamily("Qwen3_5ForCausalLM", "model.", moe=False, nested=False),
    "qwen3_5_moe": DemoFamily("Qwen3_5MoeForConditionalGeneration", "model.language_model.", moe=True, nested=True),
    "qwen3_5_moe_text": DemoFamily("Qwen3_5MoeForCausalLM", "model.", moe=True, nested=False),
}
"""Families by model type."""


def write_demo_checkpoint(
    directory: Path,
    family: str = "qwen3_5_text",
    size: str = "tiny",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **overrides: Any,
) -> ModelConfig:
    """Writes config, tokenizer, chat template and weights, and returns the config as read back.

    `directory` appears at once and whole; it must not exist, or be empty. The same arguments give the same bytes.
    `overrides` are config.json fields of the text model that replace those of `size` (`num_hidden_layers=4`,
    `tie_word_embeddings=False`, ...). Memory peaks at one shard, 0.5 GiB.
    Raises `ValueError` for an unknown family or size, `FileExistsError` for a directory with something in it.
    """
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(errno.EEXIST, "not empty; choose another directory or delete it", str(directory))
    directory.parent.mkdir(parents=True, exist_ok=True)
    content = demo_config(family, size, dtype, **overrides)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        unfinished = Path(scratch) / directory.name
        unfinished.mkdir()
        _write_json(unfinished / "config.json", content)
        _write_json(unfinished / "generation_config.json", _generation_config())
        config = read_config(unfinished)
        write_tokenizer(unfinished, config.max_position_embeddings)
        write_shards(unfinished, _weights(config, FAMILIES[family], dtype, seed), MAX_SHARD_BYTES)
        unfinished.replace(directory)
    return read_config(directory)


def demo_config(family: str, size: str, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> dict[str, Any]:
    """The config.json of a demo checkpoint; raises `ValueError` for an unknown family or size."""
    if family not in FAMILIES or size not in SIZES:
        raise ValueError(f"family {family!r}, size {size!r}: expected one of {list(FAMILIES)} and of {list(SIZES)}")
    layout = FAMILIES[family]
    text = _text_config(layout, SIZES[size]) | overrides
    top = {"architectures": [layout.architecture], "model_type": family, "dtype": str(dtype).removeprefix("torch.")}
    if not layout.nested:
        return top | text
    return top | {
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {"model_type": f"{family}_text"} | text,
    }


def _generation_config() -> dict[str, Any]:
    end_of_turn, end_of_text = token_id(END_OF_TURN), token_id(END_OF_TEXT)
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    return sampling | {"eos_token_id": [end_of_turn, end_of_text], "pad_token_id": end_of_text}


def _text_config(layout: DemoFamily, size: DemoSize) -> dict[str, Any]:
    # A multiple of 64 rows, as real vocabularies are padded, so that the head can be cut into ranks.
    vocab_size = size.vocab_size or -(-num_tokens() // 64) * 64
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "full_attention_interval": 4,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "linear_num_key_heads": size.num_k_heads,
        "linear_num_value_heads": size.num_v_heads,
        "linear_key_head_dim": size.k_head_dim,
        "linear_value_head_dim": size.v_head_dim,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": not layout.moe,
        "eos_token_id": token_id(END_OF_TURN),
        **_rope_fields(layout),
    }
    if layout.moe:
        fields |= {
            "num_experts": size.num_experts,
            "num_experts_per_tok": size.num_experts_per_token,
            "moe_intermediate_size": size.moe_intermediate_size,
            "shared_expert_intermediate_size": size.moe_intermediate_size,
        }
    if not layout.moe or layout.interleaved:
        fields["intermediate_size"] = size.intermediate_size
    if layout.interleaved:
        fields |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return fields


def _rope_fields(layout: DemoFamily) -> dict[str, Any]:
    """Qwen3-Next ships the flat fields, the later families `rope_parameters`."""
    rope: dict[str, Any] = {"rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
    return rope if layout.interleaved else {"rope_parameters": {"rope_type": "default", **rope}}


def demo_dialect(config: ModelConfig, layout: DemoFamily) -> Dialect:
    """The dialect in which the official checkpoints of a family are written."""
    experts: ExpertLayout = "per_expert" if layout.interleaved else "fused"
    return Dialect(
        tensors={},
        disk_names={},
        gdn="interleaved" if layout.interleaved else "split",
        experts=tuple(experts if sparse else None for sparse in config.sparse_layers),
        has_lm_head=not config.tie_word_embeddings,
        num_mtp_tensors=0,
        num_vision_tensors=0,
    )


def _weights(
    config: ModelConfig, layout: DemoFamily, dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in expected_tensors(config, demo_dialect(config, layout)):
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        tensor = _random_weight(name, shape, dtype, generator)
        if name == "lm_head.weight" or (name == "embed_tokens.weight" and config.tie_word_embeddings):
            _favour_readable_bytes(tensor)
        yield (name if name == "lm_head.weight" else layout.prefix + name), tensor


def _random_weight(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values under which the recurrent state matters: decays from fast to slow, norms around their neutral value."""
    weight = torch.empty(shape, dtype=torch.float32 if len(shape) == 1 else dtype)
    if name.endswith("A_log"):
        return weight.uniform_(0.01, 16.0, generator=generator).log_()
    if name.endswith("dt_bias"):
        return weight.uniform_(-6.0, 0.0, generator=generator).to(dtype)
    if len(shape) == 1:
        neutral = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
        return weight.uniform_(neutral - 0.2, neutral + 0.2, generator=generator).to(dtype)
    # Logits with a standard deviation of 2.5: a peaked, yet varied, distribution.
    gain = 2.5 if name in ("lm_head.weight", "embed_tokens.weight") else 1.0
    return weight.normal_(0.0, gain * shape[-1] ** -0.5, generator=generator)


def _favour_readable_bytes(head: torch.Tensor) -> None:
    """Quietens the rows of unprintable bytes and unused ids, so that a random model answers in letters."""
    loud = {*range(0x20, 0x7F), token_id(END_OF_TURN)}
    quiet = [row for row in range(min(len(head), num_tokens() + 64)) if row not in loud]
    head[quiet] *= 0.1


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
