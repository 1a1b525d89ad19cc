"""Owns the mixture of experts: router, routed experts, gated shared expert. HF `Qwen3NextSparseMoeBlock`."""

from dataclasses import dataclass

import torch

from warmstate.kernels.linear_torch import ROW_QUANTUM
from warmstate.kernels.select import Kernels
from warmstate.models.config import ModelConfig
from warmstate.models.mlp import DenseMlp, gated_mlp
from warmstate.models.ranks import Communicator, RankSlice


@dataclass(frozen=True, slots=True)
class _Grouping:
    """(token, choice) pairs in expert order, each local expert's padded to `ROW_QUANTUM` rows.

    `tokens` [P] is the token of each row (any where padding); `row_of_choice` [T, k] the row of each choice, or P for
    an expert of another rank; `counts` the padded rows of each local expert.
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
        local = choices.flatten() - self._experts.start
        foreign = (local < 0) | (local >= len(self._experts))
        local = local.masked_fill(foreign, len(self._experts))
        pairs = torch.bincount(local, minlength=len(self._experts) + 1)[:-1]
        padded = (pairs + ROW_QUANTUM - 1) // ROW_QUANTUM * ROW_QUANTUM
        num_rows = int(padded.sum())
        order = torch.argsort(local, stable=True)
        rank_in_expert = (
            torch.arange(len(local)) - _exclusive_sum(torch.bincount(local, minlength=len(pairs) + 1))[local[order]]
        )
        row = torch.cat((_exclusive_sum(padded), torch.tensor([num_rows])))[local[order]] + rank_in_expert
        row = torch.where(foreign[order], num_rows, row)
        row_of_pair = torch.empty_like(row)
        row_of_pair[order] = row
        tokens = torch.zeros(num_rows + 1, dtype=torch.int64)
        tokens[row_of_pair] = torch.arange(len(local)) // choices.shape[1]
        return _Grouping(tokens[:-1], row_of_pair.view_as(choices), padded.tolist())


def _exclusive_sum(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0) - counts
