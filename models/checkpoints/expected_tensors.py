"""Owns the full list of tensors a model must have, with shapes, in the dialect of its checkpoint. Reads no file."""

from collections.abc import Iterator

from warmstate.models.checkpoints.dialects import Dialect
from warmstate.models.config import ModelConfig

Expected = tuple[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig, dialect: Dialect) -> Iterator[Expected]:
    """Canonical name and shape of each tensor, layer by layer; lm_head only where the checkpoint cannot do without."""
    yield "embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "norm.weight", (config.hidden_size,)
    if dialect.has_lm_head or not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        yield from layer_tensors(config, dialect, layer)


def layer_tensors(config: ModelConfig, dialect: Dialect, layer: int) -> Iterator[Expected]:
    """The tensors of one layer."""
    prefix, hidden = f"layers.{layer}.", config.hidden_size
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    if config.layer_types[layer] == "full_attention":
        yield from _attention(config, f"{prefix}self_attn.")
    else:
        yield from _gated_delta_net(config, dialect, f"{prefix}linear_attn.")
    experts = dialect.experts[layer]
    if experts is None:
        yield from _mlp(f"{prefix}mlp.", hidden, config.intermediate_size)
        return
    yield f"{prefix}mlp.gate.weight", (config.num_experts, hidden)
    yield f"{prefix}mlp.shared_expert_gate.weight", (1, hidden)
    yield from _mlp(f"{prefix}mlp.shared_expert.", hidden, config.shared_expert_intermediate_size)
    inner = config.moe_intermediate_size
    if experts == "fused":
        yield f"{prefix}mlp.experts.gate_up_proj", (config.num_experts, 2 * inner, hidden)
        yield f"{prefix}mlp.experts.down_proj", (config.num_experts, hidden, inner)
        return
    for expert in range(config.num_experts):
        yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, inner)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[Expected]:
    yield f"{prefix}gate_proj.weight", (inner, hidden)
    yield f"{prefix}up_proj.weight", (inner, hidden)
    yield f"{prefix}down_proj.weight", (hidden, inner)


def _attention(config: ModelConfig, prefix: str) -> Iterator[Expected]:
    hidden, query, key = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield f"{prefix}q_proj.weight", (2 * query, hidden)
    yield f"{prefix}k_proj.weight", (key, hidden)
    yield f"{prefix}v_proj.weight", (key, hidden)
    yield f"{prefix}o_proj.weight", (hidden, query)
    yield f"{prefix}q_norm.weight", (config.head_dim,)
    yield f"{prefix}k_norm.weight", (config.head_dim,)


def _gated_delta_net(config: ModelConfig, dialect: Dialect, prefix: str) -> Iterator[Expected]:
    hidden, heads = config.hidden_size, config.num_v_heads
    key, value = config.num_k_heads * config.k_head_dim, heads * config.v_head_dim
    if dialect.gdn == "interleaved":
        yield f"{prefix}in_proj_qkvz.weight", (2 * key + 2 * value, hidden)
        yield f"{prefix}in_proj_ba.weight", (2 * heads, hidden)
    else:
        yield f"{prefix}in_proj_qkv.weight", (2 * key + value, hidden)
        yield f"{prefix}in_proj_z.weight", (value, hidden)
        yield f"{prefix}in_proj_b.weight", (heads, hidden)
        yield f"{prefix}in_proj_a.weight", (heads, hidden)
    yield f"{prefix}conv1d.weight", (2 * key + value, 1, config.conv_kernel)
    yield f"{prefix}A_log", (heads,)
    yield f"{prefix}dt_bias", (heads,)
    yield f"{prefix}norm.weight", (config.v_head_dim,)
    yield f"{prefix}out_proj.weight", (hidden, value)
