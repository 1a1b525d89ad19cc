"""The NKI attention equals softmax(q k^T) v, in the simulator, over pages in any order."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmstate.kernels.nki_bench import Shape, bench

Attention = Callable[..., Any]

D, PAGE = 256, 64
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 133, 255, 1000)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def _truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [T, Hq, D] are the last T of the tokens of k, v [S, Hk, D]; float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * D**-0.5
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


def _prefill(prefill: Attention, q: Any, k: Any, v: Any, order: list[int], **keywords: Any) -> Any:
    """The kernel on the last len(q) tokens of k, v, of which those before lie in the pages `order`."""
    prior = len(k) - len(q)
    num_blocks = max(1, -(-prior // PAGE))
    pages = [_paged(x[:prior], order[:num_blocks], len(order)).nan_to_num(7.0) for x in (k, v)]
    own = (x[prior:].contiguous() for x in (k, v))
    lengths = torch.tensor([[prior]], dtype=torch.int32)
    table = torch.tensor(order[:num_blocks], dtype=torch.int32)
    return prefill(q, *own, *pages, table, lengths, scale=D**-0.5, **keywords)


def _order(num_pages: int, seed: int = 2) -> list[int]:
    return torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.pairwise(
    length=LENGTHS,
    prior=(0, 1, 63, 64, 65, 128, 600),
    heads=((1, 1), (2, 1), (3, 1), (2, 2), (6, 2)),
    dtype=(torch.float32, torch.bfloat16),
    gated=(False, True),
    lnc=(1, 2),
)
def test_prefill_equals_the_truth(
    prefill: Attention, length: int, prior: int, heads: tuple[int, int], dtype: torch.dtype, gated: bool, lnc: int
) -> None:
    """`heads` are query and key heads; a launch is one sequence, so `prior` stands where others have a batch."""
    q, gate = (_normal(length, heads[0], D, seed=s, dtype=dtype) for s in (0, 3))
    k, v = (_normal(prior + length, heads[1], D, seed=s, dtype=dtype) for s in (1, 2))
    out = _prefill(prefill, q, k, v, _order(20), gate=gate if gated else None, lnc=lnc)
    expected = _truth(q, k, v)
    assert out.dtype == dtype
    assert _error(out, expected * gate.double().sigmoid() if gated else expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_cut_at_random_give_what_one_call_gives(prefill: Attention, dtype: torch.dtype, seed: int) -> None:
    q, k, v = (_normal(300, heads, D, seed=10 * seed + heads, dtype=dtype) for heads in (2, 1, 1))
    whole = _prefill(prefill, q, k, v, _order(8, seed))
    cuts = sorted(random.Random(seed).sample(range(1, 300), 1 + seed))
    parts = [
        _prefill(prefill, q[first:last].contiguous(), k[:last], v[:last], _order(8, seed))
        for first, last in zip((0, *cuts), (*cuts, 300), strict=True)
    ]
    assert _error(torch.cat(parts), whole) <= TOLERANCE[dtype]


@pytest.mark.pairwise(
    longest=LENGTHS,
    batch=(1, 2, 3, 4),
    heads=((1, 1), (2, 1), (3, 1), (6, 2)),
    dtype=(torch.float32, torch.bfloat16),
    gated=(False, True),
    lnc=(1, 2),
)
def test_decode_equals_the_last_row_of_prefill(
    decode: Attention, longest: int, batch: int, heads: tuple[int, int], dtype: torch.dtype, gated: bool, lnc: int
) -> None:
    """Contexts up to `longest` side by side; what no sequence stored must not be seen, unused entries not be read."""
    lengths = [longest, *(length for length in (130, 1, 64, 255) if length <= longest)][:batch]
    lengths += [longest] * (batch - len(lengths))
    blocks = -(-longest // PAGE)
    num_pages = batch * blocks + 3
    order = _order(num_pages)
    tables = [order[i * blocks : (i + 1) * blocks] for i in range(batch)]
    key_pages, value_pages = (torch.full((num_pages, heads[1], PAGE, D), 7.0, dtype=dtype) for _ in range(2))
    q, gate = (_normal(batch, heads[0], D, seed=s, dtype=dtype) for s in (0, 9))
    expected = []
    for i, length in enumerate(lengths):
        k, v = (_normal(length, heads[1], D, seed=s + i, dtype=dtype) for s in (20, 40))
        used = tables[i][: -(-length // PAGE)]
        for pages, x in ((key_pages, k), (value_pages, v)):
            stored = _paged(x, used, num_pages)
            pages.copy_(torch.where(stored.isnan(), pages, stored))
        tables[i] = used + [num_pages + 99] * (blocks - len(used))
        expected.append(_truth(q[i : i + 1], k, v))
    tensors = (torch.tensor(tables, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)[:, None])
    out = decode(q, key_pages, value_pages, *tensors, gate=gate if gated else None, scale=D**-0.5, lnc=lnc)
    truth = torch.cat(expected)
    assert out.dtype == dtype
    assert _error(out, truth * gate.double().sigmoid() if gated else truth) <= TOLERANCE[dtype]


@pytest.mark.parametrize("page", [1, 2, 16, 32, 128])
def test_pages_may_have_any_size_that_divides_128(decode: Attention, page: int) -> None:
    """Enough of them for two tiles of the largest rows, the second in part, and in any order."""
    length = {1: 130, 2: 300}.get(page, 1100)
    k, v = (_normal(length, 2, D, seed=s) for s in (1, 2))
    blocks = -(-length // page)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    stored = []
    for x in (k, v):
        pages = torch.full((blocks, 2, page, D), 7.0)
        for i, where in enumerate(order.tolist()):
            rows = x[i * page : (i + 1) * page]
            pages[where, :, : len(rows)] = rows.transpose(0, 1)
        stored.append(pages)
    q = _normal(1, 4, D)
    out = decode(q, *stored, order.int()[None], torch.tensor([[length]], dtype=torch.int32), scale=D**-0.5)
    assert _error(out, _truth(q, k, v)) <= 1e-5


def test_an_entry_out_of_range_is_read_as_zeros(decode: Attention) -> None:
    """Also one whose rows a multiplication in 32 bits would bring back inside."""
    entries = [2, 2**31 - 1, -(2**31), -1, 4, 2**26, 1]
    k, v = (_normal(len(entries) * PAGE, 1, D, seed=s) for s in (1, 2))
    key_pages, value_pages = (torch.full((4, 1, PAGE, D), 7.0) for _ in range(2))
    for i, entry in enumerate(entries):
        own = slice(i * PAGE, (i + 1) * PAGE)
        if 0 <= entry < 4:
            key_pages[entry, 0], value_pages[entry, 0] = k[own, 0], v[own, 0]
        else:
            k[own], v[own] = 0.0, 0.0
    q, table = _normal(1, 2, D), torch.tensor([entries], dtype=torch.int32)
    length = torch.tensor([[len(k)]], dtype=torch.int32)
    out = decode(q, key_pages, value_pages, table, length, scale=D**-0.5)
    assert _error(out, _truth(q, k, v)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_past_fits_the_memory_of_the_core(prefill: Attention, dtype: torch.dtype) -> None:
    """32,768 tokens before a chunk whose queries go through them twice."""
    q = _normal(2, 5, D, dtype=dtype)
    k, v = (_normal(32768 + 2, 1, D, seed=s, dtype=dtype) for s in (1, 2))
    out = _prefill(prefill, q, k, v, _order(512), lnc=1)
    assert _error(out, _truth(q, k, v)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("kernel", "shape", "least"),
    [
        ("attention_prefill", Shape(tokens=2048, heads=2), 0.60),
        ("attention_prefill", Shape(tokens=4096, heads=1), 0.70),
        ("attention_decode", Shape(tokens=2048, batch=8, heads=8), 0.50),
    ],
)
def test_the_tensor_engine_is_busy_for_most_of_the_time(kernel: str, shape: Shape, least: float) -> None:
    estimate = bench(kernel, shape, torch.bfloat16).estimate
    for busy_us, makespan_us in zip(estimate.busy_us["tensor"], estimate.makespan_us, strict=True):
        assert least <= busy_us / makespan_us < 1


@pytest.mark.parametrize(("batch", "tokens"), [(8, 2048), (2, 8192)])
def test_decode_stays_within_twice_what_its_transfers_take(batch: int, tokens: int) -> None:
    made = bench("attention_decode", Shape(tokens=tokens, batch=batch, heads=8), torch.bfloat16)
    assert made.floor is not None
    for makespan_us in made.estimate.makespan_us:
        assert 1 < makespan_us / made.floor.bytes_us <= 2


@pytest.mark.parametrize(("shared", "spread", "scale"), [(0, 100, 2.0**-1), (100, 1, 2.0**-10), (-100, 1, 2.0**-10)])
def test_large_scores_do_not_overflow(prefill: Attention, shared: int, spread: int, scale: float) -> None:
    """Scores of integers, which float32 holds exactly: far apart up to 1e5, and all near 2500 or -2500."""
    generator = torch.Generator().manual_seed(0)
    q, k = (
        part + torch.randint(-spread, spread + 1, (140, 1, D), generator=generator).float()
        for part in (abs(shared), shared)
    )
    v = _normal(140, 1, D, seed=2)
    assert (q[:, 0] @ k[:, 0].T).abs().max() * scale > 1e3
    pages = torch.zeros(1, 1, PAGE, D)
    where = torch.zeros(1, dtype=torch.int32)
    out = prefill(q, k, v, pages, pages, where, where[None], scale=scale)
    assert _error(out, _truth(q * (D**0.5 * scale), k, v)) <= 1e-5
