"""Owns the activation functions, in two forms: fused, and exact at every position. Knows no layer.

torch computes the head of a buffer with vector code and its tail with scalar code; for sigmoid, silu and softplus the
two differ in the last bit, so that a value would depend on how many neighbours it has. exp and log1p use vector code
throughout, and sums, products and quotients are rounded correctly everywhere: forms made of those alone are exact.
"""

from typing import Protocol

import torch
import torch.nn.functional as F


class Pointwise(Protocol):
    """Activations over float32 tensors of any shape. Implementations: `FusedPointwise` and `ExactPointwise`."""

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor: ...

    def silu_(self, x: torch.Tensor) -> torch.Tensor:
        """Silu in place: large activations must not cost a fresh buffer each."""
        ...

    def softplus(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_product_(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """total += a * b."""
        ...


class FusedPointwise:
    """torch's own functions: one pass each."""

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)

    def silu_(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x, inplace=True)

    def softplus(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x)

    def add_product_(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return total.addcmul_(a, b)


class ExactPointwise:
    """The same functions, bit-identical at every position of a buffer and for every number of threads."""

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return x.neg().exp_().add_(1.0).reciprocal_()

    def silu_(self, x: torch.Tensor) -> torch.Tensor:
        return x.div_(x.neg().exp_().add_(1.0))

    def softplus(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))

    def add_product_(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return total.add_(a * b)
