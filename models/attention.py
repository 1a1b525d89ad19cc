"""Owns the gated GQA mixer: projections, q and k norms, rotation, paged attention, output gate.

HF `Qwen3NextAttention` / `Qwen3_5Attention`.
"""

import torch

from warmstate.kernels.attention_torch import attend
from warmstate.kernels.norm_torch import rms_norm
from warmstate.kernels.select import Kernels
from warmstate.models.backend import StateShapes
from warmstate.models.kv_pool import KvPool
from warmstate.models.ranks import Communicator
from warmstate.models.rotary import rotate_
from warmstate.models.step_layout import StepLayout


class GatedAttention:
    """The mixer of one full_attention layer, with this rank's heads; `index` counts the attention layers."""

    def __init__(
        self, weights: dict[str, torch.Tensor], shapes: StateShapes, index: int, eps: float, kernels: Kernels
    ) -> None:
        self._index = index
        self._eps = eps
        self._kernels = kernels
        self._num_kv_heads, self._head_dim = shapes.num_kv_heads, shapes.head_dim
        self._q_gate_proj, self._o_proj = weights["q_gate_proj"], weights["o_proj"]
        self._k_proj, self._v_proj = weights["k_proj"], weights["v_proj"]
        self._q_norm, self._k_norm = weights["q_norm"], weights["k_norm"]

    def forward(
        self,
        x: torch.Tensor,
        layout: StepLayout,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        pool: KvPool,
        ranks: Communicator,
    ) -> torch.Tensor:
        """[T, H] float32 to [T, H]; stores the tokens' keys and values in `pool`."""
        linear = self._kernels.linear
        q, gate = linear(x, self._q_gate_proj).view(len(x), -1, 2 * self._head_dim).chunk(2, dim=-1)
        k = rms_norm(linear(x, self._k_proj).view(len(x), -1, self._head_dim), self._k_norm, self._eps)
        v = linear(x, self._v_proj).view(len(x), -1, self._head_dim)
        q = rms_norm(q, self._q_norm, self._eps)
        rotate_(q, *cos_sin)
        rotate_(k, *cos_sin)
        pool.put_tokens(self._index, layout.kv_rows, k, v)
        q.mul_(self._head_dim**-0.5)
        mixed = torch.empty_like(q)
        keys, values = pool.pages[self._index]
        for tiles in layout.attention:
            attend(q, keys, values, self._num_kv_heads, tiles, mixed)
        mixed.mul_(self._kernels.pointwise.sigmoid(gate))
        return ranks.all_reduce(linear(mixed.flatten(1), self._o_proj))
