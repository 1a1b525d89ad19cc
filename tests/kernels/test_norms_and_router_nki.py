"""The NKI norms, the rotation and the router equal torch, in the simulator."""

from typing import Any

import pytest
import torch

from warmstate.kernels.norm_torch import rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 133, 255, 1000]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rmsnorm_equals_the_truth(nki: Any, length: int, dtype: torch.dtype) -> None:
    x, weight = 3 * _normal(length, 320).to(dtype), 0.1 * _normal(320, seed=1)
    run = nki.kernel("rmsnorm_nki", "rmsnorm")
    out = run(x, weight, zero_centred=True, lnc=1 + length % 2)
    assert _error(out, rms_norm(x.float(), 1 + weight, 1e-6)) <= TOLERANCE[dtype]


def test_rmsnorm_of_zeros_is_zero(nki: Any) -> None:
    out = nki.kernel("rmsnorm_nki", "rmsnorm")(torch.zeros(3, 64), torch.ones(64))
    assert torch.equal(out, torch.zeros(3, 64))


@pytest.mark.parametrize("length", LENGTHS[:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_equal_the_truth(nki: Any, length: int, dtype: torch.dtype) -> None:
    heads, width, half = length % 3 + 1, 256, 32
    x, weight = _normal(length, heads, width).to(dtype), 0.1 * _normal(width, seed=1)
    angles = 7 * _normal(length, half, seed=2)
    run = nki.kernel("qk_norm_rope_nki", "qk_norm_rope")
    out = run(x, weight, angles.cos(), angles.sin(), lnc=1 + length % 2)
    expected = rms_norm(x.float(), 1 + weight, 1e-6)
    first, second = expected[..., :half].clone(), expected[..., half : 2 * half].clone()
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    expected[..., :half], expected[..., half : 2 * half] = first * cos - second * sin, second * cos + first * sin
    assert _error(out, expected) <= TOLERANCE[dtype]


def test_rotation_of_the_whole_head(nki: Any) -> None:
    x = _normal(5, 2, 64)
    run = nki.kernel("qk_norm_rope_nki", "qk_norm_rope")
    out = run(x, torch.zeros(64), torch.ones(5, 32), torch.zeros(5, 32))
    assert _error(out, rms_norm(x, torch.ones(64), 1e-6)) <= 1e-5


@pytest.mark.parametrize("length", LENGTHS[:-1])
@pytest.mark.parametrize(("experts", "k"), [(256, 8), (512, 10)])
def test_the_router_chooses_what_torch_chooses(nki: Any, length: int, experts: int, k: int) -> None:
    logits = 4 * _normal(length, experts, seed=length)
    weights, indices = nki.kernel("router_topk_nki", "router_topk")(logits, k, lnc=1 + length % 2)
    top, expected = torch.softmax(logits, dim=-1).topk(k, dim=-1)
    assert torch.equal(indices.to(torch.int64), expected)
    assert _error(weights, top / top.sum(-1, keepdim=True)) <= 1e-5


def test_weights_without_renormalisation_are_those_of_the_whole_softmax(nki: Any) -> None:
    logits = _normal(9, 64)
    weights, _ = nki.kernel("router_topk_nki", "router_topk")(logits, 8, renormalise=False)
    assert _error(weights, torch.softmax(logits, dim=-1).topk(8, dim=-1).values) <= 1e-5


def test_equal_logits_are_taken_once_each(nki: Any) -> None:
    weights, indices = nki.kernel("router_topk_nki", "router_topk")(torch.zeros(2, 16), 10)
    assert sorted(indices[0].tolist()) == list(range(10))
    assert _error(weights, torch.full((2, 10), 0.1)) <= 1e-6
