"""The NKI norms, the rotation and the router equal torch, in the simulator."""

from typing import Any

import pytest
import torch

from warmstate.kernels.norm_torch import rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 133, 255, 1000)
DTYPES = (torch.float32, torch.bfloat16)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.pairwise(
    length=LENGTHS, batch=(1, 2, 3, 4), width=(64, 320, 2048), dtype=DTYPES, zero_centred=(False, True), lnc=(1, 2)
)
def test_rmsnorm_equals_the_truth(
    nki: Any, length: int, batch: int, width: int, dtype: torch.dtype, zero_centred: bool, lnc: int
) -> None:
    x, weight = 3 * _normal(batch * length, width).to(dtype), 1 + 0.1 * _normal(width, seed=1)
    given = weight - 1 if zero_centred else weight
    out = nki.kernel("rmsnorm_nki", "rmsnorm")(x, given, zero_centred=zero_centred, lnc=lnc)
    assert out.dtype == dtype
    assert _error(out, rms_norm(x.double(), weight.double(), 1e-6)) <= TOLERANCE[dtype]


def test_rmsnorm_of_zeros_is_zero(nki: Any) -> None:
    out = nki.kernel("rmsnorm_nki", "rmsnorm")(torch.zeros(3, 64), torch.ones(64))
    assert torch.equal(out, torch.zeros(3, 64))


@pytest.mark.pairwise(
    length=LENGTHS, batch=(1, 2, 3, 4), heads=(1, 2, 3, 4), half=(8, 32, 128), dtype=DTYPES, lnc=(1, 2)
)
def test_norm_and_rotation_equal_the_truth(
    nki: Any, length: int, batch: int, heads: int, half: int, dtype: torch.dtype, lnc: int
) -> None:
    """`half` 128 rotates all of the head, 32 a quarter of it, as Qwen3-Next does."""
    width = 256
    x, weight = _normal(batch * length, heads, width).to(dtype), 0.1 * _normal(width, seed=1)
    angles = (7 * _normal(length, half, seed=2)).repeat(batch, 1)
    run = nki.kernel("qk_norm_rope_nki", "qk_norm_rope")
    out = run(x, weight, angles.cos(), angles.sin(), lnc=lnc)
    expected = rms_norm(x.double(), 1 + weight.double(), 1e-6)
    first, second = expected[..., :half].clone(), expected[..., half : 2 * half].clone()
    cos, sin = angles.cos()[:, None].double(), angles.sin()[:, None].double()
    expected[..., :half], expected[..., half : 2 * half] = first * cos - second * sin, second * cos + first * sin
    assert out.dtype == dtype
    assert _error(out, expected) <= TOLERANCE[dtype]


def test_rotation_of_the_whole_head(nki: Any) -> None:
    x = _normal(5, 2, 64)
    run = nki.kernel("qk_norm_rope_nki", "qk_norm_rope")
    out = run(x, torch.zeros(64), torch.ones(5, 32), torch.zeros(5, 32))
    assert _error(out, rms_norm(x, torch.ones(64), 1e-6)) <= 1e-5


@pytest.mark.pairwise(
    length=LENGTHS,
    batch=(1, 2, 3, 4),
    experts_and_k=((8, 1), (64, 8), (256, 8), (512, 10)),
    renormalise=(False, True),
    lnc=(1, 2),
)
def test_the_router_chooses_what_torch_chooses(
    nki: Any, length: int, batch: int, experts_and_k: tuple[int, int], renormalise: bool, lnc: int
) -> None:
    experts, k = experts_and_k
    logits = 4 * _normal(batch * length, experts, seed=length)
    weights, indices = nki.kernel("router_topk_nki", "router_topk")(logits, k, renormalise=renormalise, lnc=lnc)
    top, expected = torch.softmax(logits.double(), dim=-1).topk(k, dim=-1)
    assert torch.equal(indices.to(torch.int64), expected)
    assert _error(weights, top / top.sum(-1, keepdim=True) if renormalise else top) <= 1e-5


def test_equal_logits_are_taken_once_each(nki: Any) -> None:
    weights, indices = nki.kernel("router_topk_nki", "router_topk")(torch.zeros(2, 16), 10)
    assert sorted(indices[0].tolist()) == list(range(10))
    assert _error(weights, torch.full((2, 10), 0.1)) <= 1e-6
