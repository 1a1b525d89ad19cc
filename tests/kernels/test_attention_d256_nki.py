"""The NKI attention equals softmax(q k^T) v, in the simulator, over pages in any order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

Attention = Callable[..., Any]

D, PAGE = 256, 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


def _truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [T, Hq, D] are the last T of the tokens of k, v [S, Hk, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * D**-0.5
    future = torch.arange(len(k))[None, :] > torch.arange(len(k) - len(q), len(k))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def _paged(x: torch.Tensor, table: list[int], num_pages: int) -> torch.Tensor:
    """[N, Hk, P, D] with the tokens of `x` [S, Hk, D] in the pages of `table`; NaN wherever nothing was stored."""
    pages = torch.full((num_pages, x.shape[1], PAGE, D), float("nan"), dtype=x.dtype)
    for i, page in enumerate(table):
        rows = x[i * PAGE : (i + 1) * PAGE]
        pages[page, :, : len(rows)] = rows.transpose(0, 1)
    return pages


@pytest.fixture(scope="module")
def prefill(nki: Any) -> Attention:
    kernel: Attention = nki.kernel("attention_d256_nki", "attention_prefill")
    return kernel


@pytest.fixture(scope="module")
def decode(nki: Any) -> Attention:
    kernel: Attention = nki.kernel("attention_d256_nki", "attention_decode")
    return kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("length", "prior", "q_heads", "k_heads"),
    [
        (1, 0, 1, 1),
        (2, 63, 2, 1),
        (63, 64, 3, 1),
        (64, 65, 2, 2),
        (127, 128, 1, 1),
        (129, 1, 2, 1),
        (133, 600, 2, 2),
        (255, 0, 3, 1),
        (1000, 0, 1, 1),
    ],
)
def test_prefill_equals_the_truth(
    prefill: Attention, length: int, prior: int, q_heads: int, k_heads: int, dtype: torch.dtype
) -> None:
    q, gate = (_normal(length, q_heads, D, seed=s, dtype=dtype) for s in (0, 3))
    k, v = (_normal(prior + length, k_heads, D, seed=s, dtype=dtype) for s in (1, 2))
    num_blocks = max(1, -(-prior // PAGE))
    table = [(5 * i + 3) % (num_blocks * 5 + 1) for i in range(num_blocks)]
    pages = [_paged(x[:prior], table, num_blocks * 5 + 1).nan_to_num(7.0) for x in (k, v)]
    lengths = torch.tensor([[prior]], dtype=torch.int32)
    out = prefill(
        q,
        k[prior:].contiguous(),
        v[prior:].contiguous(),
        *pages,
        torch.tensor(table, dtype=torch.int32),
        lengths,
        gate=gate,
        scale=D**-0.5,
        lnc=k_heads,
    )
    assert _error(out, _truth(q, k, v) * gate.float().sigmoid()) <= TOLERANCE[dtype]


def test_without_a_gate_the_output_is_the_plain_one(prefill: Attention) -> None:
    q, k, v = (_normal(70, 1, D, seed=s) for s in range(3))
    pages = torch.zeros(1, 1, PAGE, D)
    where = torch.zeros(1, dtype=torch.int32)
    out = prefill(q, k, v, pages, pages, where, where[None], scale=D**-0.5)
    assert _error(out, _truth(q, k, v)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "k_heads"), [(1, 1), (2, 1), (6, 2)])
def test_decode_equals_the_last_row_of_prefill(
    decode: Attention, q_heads: int, k_heads: int, dtype: torch.dtype
) -> None:
    lengths = [1, 64, 130, 255]
    blocks = 4
    order = torch.randperm(20, generator=torch.Generator().manual_seed(2)).tolist()
    tables = [order[i * blocks : (i + 1) * blocks] for i in range(len(lengths))]
    key_pages, value_pages = (torch.full((20, k_heads, PAGE, D), 7.0, dtype=dtype) for _ in range(2))
    q, gate = (_normal(len(lengths), q_heads, D, seed=s, dtype=dtype) for s in (0, 9))
    expected = []
    for i, length in enumerate(lengths):
        k, v = (_normal(length, k_heads, D, seed=s + i, dtype=dtype) for s in (20, 40))
        used = tables[i][: -(-length // PAGE)]
        for pages, x in ((key_pages, k), (value_pages, v)):
            stored = _paged(x, used, 20)
            pages.copy_(torch.where(stored.isnan(), pages, stored))
        tables[i] = used + [99] * (blocks - len(used))
        expected.append(_truth(q[i : i + 1], k, v))
    tensors = (torch.tensor(tables, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)[:, None])
    out = decode(q, key_pages, value_pages, *tensors, gate=gate, scale=D**-0.5, lnc=2)
    assert _error(out, torch.cat(expected) * gate.float().sigmoid()) <= TOLERANCE[dtype]


def test_large_scores_do_not_overflow(prefill: Attention) -> None:
    q, k, v = (40 * _normal(140, 1, D, seed=s) for s in range(3))
    pages = torch.zeros(1, 1, PAGE, D)
    where = torch.zeros(1, dtype=torch.int32)
    out = prefill(q, k, v, pages, pages, where, where[None], scale=1.0)
    expected = _truth(q * D**0.5, k, v)
    assert out.isfinite().all()
    assert _error(out, expected) <= 1e-3
