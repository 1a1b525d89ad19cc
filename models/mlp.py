"""Owns the dense MLP: down(silu(gate x) * up x). HF `Qwen3NextMLP`."""

import torch

from warmstate.kernels.select import Kernels
from warmstate.models.ranks import Communicator


class DenseMlp:
    """One MLP with this rank's rows; `gate_up` [2F, H] has the gate first."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, kernels: Kernels) -> None:
        self._gate_up, self._down = gate_up, down
        self._kernels = kernels

    def forward(self, x: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        """[T, H] float32 to [T, H]."""
        return ranks.all_reduce(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand."""
        return gated_mlp(x, self._gate_up, self._down, self._kernels)


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """down(silu(gate x) * up x) for `gate_up` [2F, H] (gate first) and `down` [H, F]."""
    width = down.shape[1]
    gate = kernels.pointwise.silu_(kernels.linear(x, gate_up[:width]))
    return kernels.linear(gate.mul_(kernels.linear(x, gate_up[width:])), down)
