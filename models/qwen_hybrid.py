"""Owns the stack of a Qwen hybrid model, from token ids to logits, for one rank. Knows no slot and no file."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from warmstate.kernels.norm_torch import rms_norm
from warmstate.kernels.select import Kernels
from warmstate.models.attention import GatedAttention
from warmstate.models.backend import StateShapes
from warmstate.models.config import ModelConfig
from warmstate.models.gated_delta_net import CapturedStates, GatedDeltaNet
from warmstate.models.kv_pool import KvPool
from warmstate.models.mlp import DenseMlp
from warmstate.models.moe import MixtureOfExperts
from warmstate.models.ranks import RankGroups, RankSlice
from warmstate.models.rotary import Rotary
from warmstate.models.state_pool import StatePool
from warmstate.models.step_layout import StepLayout


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    mixer: GatedDeltaNet | GatedAttention
    index: int
    post_norm: torch.Tensor
    mlp: DenseMlp | MixtureOfExperts


class QwenHybrid:
    """The model of one rank. Activations are float32; weights keep the dtype they came in."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[int | None, dict[str, torch.Tensor]]],
        dtype: torch.dtype,
        kernels: Kernels,
        ranks: RankSlice | None = None,
        groups: RankGroups | None = None,
    ) -> None:
        """Builds the model from the (layer or None, tensors) pairs of `loading.load_weights`, one layer at a time."""
        self.config = config
        self.dtype = dtype
        self._kernels = kernels
        self._ranks = ranks or RankSlice()
        self._groups = groups or RankGroups()
        self.shapes = local_shapes(config, self._ranks, dtype)
        self.num_heads = len(self._ranks.tp_range(config.num_heads, "attention heads"))
        self._rotary = Rotary(config.rope)
        layers: dict[int, _Layer] = {}
        outer: dict[str, torch.Tensor] = {}
        for index, tensors in weights:
            if index is None:
                outer = tensors
            else:
                layers[index] = self._build_layer(index, tensors)
        self._embed, self._final_norm, self._lm_head = outer["embed"], outer["final_norm"], outer["lm_head"]
        self._layers = [layers[index] for index in range(config.num_layers)]

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, layout: StepLayout, states: StatePool, kv: KvPool, captured: CapturedStates
    ) -> torch.Tensor:
        """Runs the tokens [T] int64 of one step and returns the logits [sampled, vocab] float32."""
        hidden = self._embed.index_select(0, tokens).float()
        cos_sin = self._rotary.tables(layout.positions)
        for layer in self._layers:
            x = self._norm(hidden, layer.input_norm)
            if isinstance(layer.mixer, GatedDeltaNet):
                mixed = layer.mixer.forward(x, layout, states.layers[layer.index], captured, self._groups.tp)
            else:
                mixed = layer.mixer.forward(x, layout, cos_sin, kv, self._groups.tp)
            hidden.add_(mixed)
            hidden.add_(self._run_mlp(layer.mlp, self._norm(hidden, layer.post_norm)))
        return self._logits(hidden.index_select(0, layout.sampled_tokens))

    def _build_layer(self, index: int, tensors: dict[str, torch.Tensor]) -> _Layer:
        kind = self.config.layer_types[index]
        kind_index = self.config.layer_types[:index].count(kind)
        mixer_class = GatedDeltaNet if kind == "linear_attention" else GatedAttention
        mlp: DenseMlp | MixtureOfExperts
        if self.config.sparse_layers[index]:
            mlp = MixtureOfExperts(tensors, self.config, self._ranks, self._kernels)
        else:
            mlp = DenseMlp(tensors["gate_up_proj"], tensors["down_proj"], self._kernels)
        return _Layer(
            input_norm=tensors["input_layernorm"],
            mixer=mixer_class(tensors, self.shapes, kind_index, self.config.rms_norm_eps, self._kernels),
            index=kind_index,
            post_norm=tensors["post_attention_layernorm"],
            mlp=mlp,
        )

    def _run_mlp(self, mlp: DenseMlp | MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
        if isinstance(mlp, DenseMlp):
            return mlp.forward(x, self._groups.tp)
        return mlp.forward(x, self._groups.tp, self._groups.ep)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight, self.config.rms_norm_eps)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return hidden.new_empty(0, self.config.vocab_size)
        shard = self._kernels.linear(self._norm(hidden, self._final_norm), self._lm_head)
        return self._groups.tp.all_gather(shard, dim=-1)


def local_shapes(config: ModelConfig, ranks: RankSlice, dtype: torch.dtype) -> StateShapes:
    """The state of one rank: its own heads, and the key-value heads that its query heads read.

    Raises `UnsupportedLayout` where a head count cannot be cut.
    """
    heads = ranks.tp_range(config.num_heads, "attention heads")
    per_kv_head = config.num_heads // config.num_kv_heads
    return replace(
        config.state_shapes(dtype),
        num_k_heads=len(ranks.tp_range(config.num_k_heads, "GDN key heads")),
        num_v_heads=len(ranks.tp_range(config.num_v_heads, "GDN value heads")),
        num_kv_heads=(heads.stop - 1) // per_kv_head - heads.start // per_kv_head + 1,
    )
