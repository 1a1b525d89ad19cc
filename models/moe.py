"""Owns the mixture of experts: router, routed experts, gated shared expert. HF `Qwen3NextSparseMoeBlock`."""

from dataclasses import dataclass

import torch

from warmstate.kernels.select import Kernels
from warmstate.models.config import ModelConfig
from warmstate.models.mlp import DenseMlp, gated_mlp
from warmstate.models.ranks import Communicator, RankSlice


@dataclass(frozen=True, slots=True)
class _Grouping:
    """(token, choice) pairs in expert order, without those of other ranks' experts.

    `tokens` [P] is the token of each row; `row_of_choice` [T, k] the row of each choice, or P for an expert of another
    rank; `counts` the rows of each local expert.
    """

    tokens: torch.Tensor
    row_of_choice: torch.Tensor
    counts: list[int]


class MixtureOfExperts:
    """The MLP of one sparse layer: this rank's experts, and its rows of each."""

    def __init__(
        self, weights: dict[str, torch.Tensor], config: ModelConfig, ranks: RankSlice, kernels: Kernels
    ) -> None:
        self._config = config
        self._experts = ranks.ep_range(config.num_experts)
        self._kernels = kernels
        self._router = weights["router"]
        self._gate_up, self._down = weights["experts_gate_up"], weights["experts_down"]
        self._shared = DenseMlp(weights["shared_gate_up"], weights["shared_down"], kernels)
        self._shared_gate = weights["shared_gate"]

    def forward(self, x: torch.Tensor, tp: Communicator, ep: Communicator) -> torch.Tensor:
        """[T, H] float32 to [T, H]; routed experts are summed over both kinds of ranks, the shared one over `tp`."""
        choices, choice_weights = self.route(x)
        routed = ep.all_reduce(self._routed(x, choices, choice_weights))
        shared_gate = self._kernels.pointwise.sigmoid(self._kernels.linear(x, self._shared_gate))
        return tp.all_reduce(routed.add_(self._shared.partial(x).mul_(shared_gate)))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen experts [T, k] and their weights [T, k]: scores over all experts, top k, then renormalised."""
        logits = self._kernels.linear(x, self._router)
        if self._config.router_scoring == "softmax":
            scores = torch.softmax(logits, dim=-1)
        else:
            scores = self._kernels.pointwise.sigmoid(logits)
        top, choices = scores.topk(self._config.num_experts_per_token, dim=-1)
        if self._config.norm_topk_prob:
            top = top / top.sum(-1, keepdim=True)
        return choices, top

    def _routed(self, x: torch.Tensor, choices: torch.Tensor, choice_weights: torch.Tensor) -> torch.Tensor:
        grouping = self._group(choices)
        rows = x.index_select(0, grouping.tokens)
        results = x.new_empty(len(rows) + 1, x.shape[1])
        results[-1] = 0.0
        first = 0
        for expert, count in enumerate(grouping.counts):
            if count:
                part = slice(first, first + count)
                results[part] = gated_mlp(rows[part], self._gate_up[expert], self._down[expert], self._kernels)
                first += count
        # Summed choice by choice: the order then depends on the token alone, not on who shares its experts.
        total = torch.zeros_like(x)
        for choice in range(choices.shape[1]):
            chosen = results.index_select(0, grouping.row_of_choice[:, choice])
            total.add_(chosen.mul_(choice_weights[:, choice, None]))
        return total

    def _group(self, choices: torch.Tensor) -> _Grouping:
        num_experts = len(self._experts)
        local = choices.flatten() - self._experts.start
        local.masked_fill_((local < 0) | (local >= num_experts), num_experts)
        order = torch.argsort(local, stable=True)
        counts = torch.bincount(local, minlength=num_experts + 1)[:num_experts].tolist()
        num_rows = sum(counts)
        row_of_pair = torch.empty_like(order)
        row_of_pair[order] = torch.arange(len(order)).clamp_(max=num_rows)
        return _Grouping(order[:num_rows] // choices.shape[1], row_of_pair.view_as(choices), counts)
