"""Owns how a checkpoint spells the model: prefixes, fused or split projections, expert layout.

Probed from tensor names, never from the model type, because exports of one model differ.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from warmstate.models.checkpoints.checkpoint import CheckpointIndex, TensorEntry
from warmstate.models.config import ModelConfig
from warmstate.models.errors import TensorMismatch, UnsupportedCheckpoint

_log = logging.getLogger(__name__)

GdnLayout = Literal["interleaved", "split"]
ExpertLayout = Literal["fused", "per_expert"]

# Longest first: what is left over is the canonical name (layers.0..., embed_tokens..., norm..., lm_head...).
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_MTP = "mtp."
_VISION = ("visual.", "vision_tower.", "vision_model.")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one checkpoint spells the model. `tensors` maps canonical names to places; MTP and vision are left out."""

    tensors: Mapping[str, TensorEntry]
    disk_names: Mapping[str, str]
    gdn: GdnLayout
    experts: tuple[ExpertLayout | None, ...]
    has_lm_head: bool
    num_mtp_tensors: int
    num_vision_tensors: int


def probe_dialect(index: CheckpointIndex, config: ModelConfig) -> Dialect:
    """Reads the dialect off the tensor names; raises `TensorMismatch` where two dialects are mixed.

    Whether every tensor of the dialect is there is asked by `preflight`.
    """
    tensors: dict[str, TensorEntry] = {}
    disk_names: dict[str, str] = {}
    num_mtp = num_vision = 0
    for disk_name, entry in index.tensors.items():
        name = canonical_name(disk_name)
        if name.startswith(_MTP):
            num_mtp += 1
        elif name.startswith(_VISION):
            num_vision += 1
        elif name.endswith("rotary_emb.inv_freq"):
            continue
        elif name in tensors:
            raise TensorMismatch(f"{index.directory}: {disk_name} and {disk_names[name]} are the same tensor ({name})")
        else:
            tensors[name], disk_names[name] = entry, disk_name
    return Dialect(
        tensors=tensors,
        disk_names=disk_names,
        gdn=_gdn_layout(index, config, tensors),
        experts=tuple(_expert_layout(index, config, tensors, layer) for layer in range(config.num_layers)),
        has_lm_head="lm_head.weight" in tensors,
        num_mtp_tensors=num_mtp,
        num_vision_tensors=num_vision,
    )


def log_skipped(index: CheckpointIndex, dialect: Dialect) -> None:
    """One line about the tensors that are recognised and not used."""
    if dialect.num_mtp_tensors or dialect.num_vision_tensors:
        _log.info(
            "%s: text only; skipping %d MTP and %d vision tensors",
            index.directory,
            dialect.num_mtp_tensors,
            dialect.num_vision_tensors,
        )


def canonical_name(disk_name: str) -> str:
    """`disk_name` without the prefix of its dialect."""
    for prefix in _PREFIXES:
        if disk_name.startswith(prefix):
            return disk_name[len(prefix) :]
    return disk_name


def _gdn_layout(index: CheckpointIndex, config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> GdnLayout:
    layer = config.layer_types.index("linear_attention")
    prefix = f"layers.{layer}.linear_attn."
    fused = [name for name in ("in_proj_qkvz", "in_proj_ba") if f"{prefix}{name}.weight" in tensors]
    parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    split = [name for name in parts if f"{prefix}{name}.weight" in tensors]
    if fused and split:
        raise TensorMismatch(f"{index.directory}: layer {layer} mixes {', '.join(fused)} with {', '.join(split)}")
    if not fused and not split and f"{prefix}in_proj.weight" in tensors:
        raise UnsupportedCheckpoint(f"{index.directory}: {prefix}in_proj.weight: one projection for all is not served")
    return "interleaved" if fused else "split"


def _expert_layout(
    index: CheckpointIndex, config: ModelConfig, tensors: Mapping[str, TensorEntry], layer: int
) -> ExpertLayout | None:
    if not config.sparse_layers[layer]:
        return None
    prefix = f"layers.{layer}.mlp.experts."
    fused = f"{prefix}gate_up_proj" in tensors or f"{prefix}down_proj" in tensors
    per_expert = f"{prefix}0.gate_proj.weight" in tensors or f"{prefix}0.down_proj.weight" in tensors
    if fused and per_expert:
        raise TensorMismatch(f"{index.directory}: layer {layer} has fused and per-expert weights at once")
    return "fused" if fused else "per_expert"
