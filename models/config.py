"""Owns what the model is: the sizes in config.json of the Qwen hybrid family. Knows no tensor and no weight file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from warmstate.models.backend import StateShapes
from warmstate.models.checkpoints.json_fields import JsonFields, read_json
from warmstate.models.checkpoints.special_tokens import read_eos_token_ids
from warmstate.models.errors import UnsupportedCheckpoint
from warmstate.models.rope_config import RopeConfig, read_rope

LayerType = Literal["linear_attention", "full_attention"]
RouterScoring = Literal["softmax", "sigmoid"]

SUPPORTED_MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

MAX_LAYERS = 4096

_SERVED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attn_output_gate": (True,),
    # Of the delta rule's gated norm; attention's gate is a sigmoid whatever it says.
    "output_gate_type": ("swish", "silu"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "routed_scaling_factor": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}
"""The values of switches that are served: this family's, and those of relatives that a derived model may carry over."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one model, whatever the spelling in config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    router_scoring: RouterScoring
    sparse_layers: tuple[bool, ...]
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: frozenset[int]

    def state_shapes(self, dtype: torch.dtype) -> StateShapes:
        """Sizes of one sequence's state when conv and KV are kept in `dtype`."""
        num_gdn_layers = self.layer_types.count("linear_attention")
        return StateShapes(
            num_gdn_layers=num_gdn_layers,
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            k_head_dim=self.k_head_dim,
            v_head_dim=self.v_head_dim,
            conv_kernel=self.conv_kernel,
            num_attention_layers=self.num_layers - num_gdn_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )


def read_config(path: Path) -> ModelConfig:
    """Reads config.json, generation_config.json and the tokenizer's end token of the checkpoint directory `path`.

    Raises `MissingFile`, `CheckpointError` for a malformed or impossible field, `UnsupportedCheckpoint` for a model
    type or a switch that is not served.
    """
    file = path / "config.json"
    top = JsonFields(file, read_json(file))
    model_type = top.text("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise UnsupportedCheckpoint(f"{file}: model_type {model_type!r} is not served; supported: {supported}")
    text = top.child("text_config") or top
    _check_text_model_type(text, model_type)
    for fields in (text, top):
        _refuse_unserved_switches(fields)
    num_layers = text.integer("num_hidden_layers", maximum=MAX_LAYERS)
    sparse_layers = _sparse_layers(text, num_layers)
    any_sparse, any_dense = any(sparse_layers), not all(sparse_layers)
    head_dim = text.integer("head_dim")
    vocab_size = text.integer("vocab_size")
    num_heads, num_kv_heads = _divisible(text, "num_attention_heads", "num_key_value_heads")
    num_v_heads, num_k_heads = _divisible(text, "linear_num_value_heads", "linear_num_key_heads")
    rope = read_rope(top, text, head_dim)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size"),
        num_layers=num_layers,
        intermediate_size=text.integer("intermediate_size") if any_dense else 0,
        layer_types=_layer_types(text, num_layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        k_head_dim=text.integer("linear_key_head_dim"),
        v_head_dim=text.integer("linear_value_head_dim"),
        conv_kernel=text.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=64),
        num_experts=text.integer("num_experts") if any_sparse else 0,
        num_experts_per_token=_experts_per_token(text) if any_sparse else 0,
        moe_intermediate_size=text.integer("moe_intermediate_size") if any_sparse else 0,
        shared_expert_intermediate_size=text.integer("shared_expert_intermediate_size") if any_sparse else 0,
        norm_topk_prob=_norm_topk_prob(text, model_type),
        router_scoring=_router_scoring(text),
        sparse_layers=sparse_layers,
        tie_word_embeddings=text.flag("tie_word_embeddings", False) or top.flag("tie_word_embeddings", False),
        max_position_embeddings=_longest(text, rope),
        eos_token_ids=read_eos_token_ids(path, (text, top), vocab_size),
    )


def _check_text_model_type(text: JsonFields, model_type: str) -> None:
    expected = (model_type, f"{model_type}_text")
    if text.text("model_type", model_type) not in expected:
        found = text.values["model_type"]
        raise UnsupportedCheckpoint(
            f"{text.file}: {text.where}model_type {found!r} is not served in a {model_type}, only {expected[1]!r}"
        )


def _refuse_unserved_switches(fields: JsonFields) -> None:
    """At the top level of a nested config too, where transformers would not see them."""
    for name, served in _SERVED.items():
        if fields.has(name) and fields.values[name] not in served:
            raise _unserved(fields, name, " or ".join(map(repr, served)))
    if fields.has("sliding_window") and not fields.has("use_sliding_window"):
        raise _unserved(fields, "sliding_window", "null")


def _unserved(fields: JsonFields, name: str, served: str) -> UnsupportedCheckpoint:
    only = f", only {served}" if served else ""
    return UnsupportedCheckpoint(f"{fields.file}: {fields.where}{name} = {fields.values[name]!r} is not served{only}")


def _divisible(text: JsonFields, many: str, few: str) -> tuple[int, int]:
    total, share = text.integer(many), text.integer(few)
    if total % share:
        raise text.error(many, f"expected a multiple of {few} = {share}", total)
    return total, share


def _layer_types(text: JsonFields, num_layers: int) -> tuple[LayerType, ...]:
    listed = text.items("layer_types", str)
    if listed is None:
        interval = text.integer("full_attention_interval", 4)
        listed = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    if len(listed) != num_layers:
        raise text.error("layer_types", f"expected num_hidden_layers = {num_layers} entries", listed)
    if set(listed) != {"linear_attention", "full_attention"}:
        raise text.error(
            "layer_types", "expected linear_attention and full_attention, and at least one of each", listed
        )
    return tuple("linear_attention" if kind == "linear_attention" else "full_attention" for kind in listed)


def _sparse_layers(text: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """Which layers have routed experts: transformers' rule for `mlp_only_layers` and `decoder_sparse_step`."""
    if text.integer("num_experts", 0, minimum=0) == 0:
        return (False,) * num_layers
    dense = set(text.items("mlp_only_layers", int) or ())
    step = text.integer("decoder_sparse_step", 1)
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _experts_per_token(text: JsonFields) -> int:
    return text.integer("num_experts_per_tok", maximum=text.integer("num_experts"))


def _norm_topk_prob(text: JsonFields, model_type: str) -> bool:
    """Only Qwen3-Next has the switch; transformers renormalises in 3.5 whatever its config says, others do not."""
    normalised = text.flag("norm_topk_prob", True)
    if not normalised and model_type != "qwen3_next":
        raise _unserved(text, "norm_topk_prob", f"True in a {model_type}")
    return normalised


def _router_scoring(text: JsonFields) -> RouterScoring:
    scoring = text.text("scoring_func", "softmax")
    if scoring == "softmax":
        return "softmax"
    if scoring == "sigmoid":
        return "sigmoid"
    raise UnsupportedCheckpoint(f"{text.file}: {text.where}scoring_func = {scoring!r} is not served")


def _longest(text: JsonFields, rope: RopeConfig) -> int:
    """Positions that can be served. With YaRN it is the stretched length, whichever of the two the config states."""
    stated = text.integer("max_position_embeddings")
    return stated if rope.yarn is None else int(rope.yarn.trained_length * rope.yarn.factor)
