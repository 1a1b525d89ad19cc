"""The NKI prefill of the gated delta rule equals the token recurrence, in the simulator."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from warmstate.kernels import gdn_constants
from warmstate.kernels.norm_torch import l2_norm_, rms_norm

Prefill = Callable[..., Any]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CHUNK = gdn_constants.CHUNK


def _inputs(
    prefill: Any,
    length: int,
    batch: int = 1,
    v_heads: int = 1,
    d_k: int = 128,
    d_v: int = 128,
    seed: int = 0,
    k_heads: int = 1,
) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (l2_norm_(normal(batch, k_heads, length, d_k)) for _ in range(2))
    g = -torch.rand(batch, v_heads, length, generator=generator) * 0.2
    beta = torch.rand(batch, v_heads, length, generator=generator)
    return prefill.inputs(q, k, normal(batch, v_heads, length, d_v), g, beta, normal(batch, v_heads, d_k, d_v) * 0.3)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max().clamp(min=1e-20))


def _raw(x: Any, seed: int = 3) -> tuple[Any, dict[str, torch.Tensor]]:
    """`x` as the projections give it, and what the fused front end and epilogue take."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads = x.v.shape[1]
    raw = replace(x, q=3 * x.q, k=5 * x.k, g=normal(*x.g.shape), beta=normal(*x.g.shape))
    norm_weight = 1 + 0.1 * normal(x.v.shape[3])
    fused = {"a_log": normal(heads), "dt_bias": normal(heads), "gate": normal(*x.v.shape), "norm_weight": norm_weight}
    return raw, fused


def _fused_truth(raw: Any, fused: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised q and k are rounded to their dtype, as Hugging Face's `l2norm` and the kernel do."""
    g = -fused["a_log"].double().exp()[:, None] * F.softplus(raw.g.double() + fused["dt_bias"].double()[:, None])
    q, k = (l2_norm_(t.double()).to(t.dtype) for t in (raw.q, raw.k))
    out, state = replace(raw, q=q, k=k, g=g, beta=raw.beta.double().sigmoid()).truth()
    return rms_norm(out, fused["norm_weight"].double(), 1e-6) * F.silu(fused["gate"].double()), state


@pytest.mark.pairwise(
    length=(1, 2, 63, 64, 65, 127, 128, 129, 133, 255, 1000),
    batch=(1, 2, 3, 4),
    heads=((1, 1), (1, 2), (1, 3), (2, 4)),
    dtype=(torch.float32, torch.bfloat16),
    fused=(False, True),
    starts_empty=(False, True),
    lnc=(1, 2),
)
def test_prefill_equals_the_recurrence(
    prefill: Prefill,
    length: int,
    batch: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    fused: bool,
    starts_empty: bool,
    lnc: int,
) -> None:
    x = _inputs(prefill, length, batch, heads[1], k_heads=heads[0])
    keywords: dict[str, Any] = {"lnc": lnc}
    if starts_empty:
        x = replace(x, state=torch.zeros_like(x.state))
        keywords["initial_state"] = None
    if not fused:
        x = x.to(dtype)
        expected, expected_state = x.truth()
    else:
        raw, extra = _raw(x)
        x, extra = raw.to(dtype), {**extra, "gate": extra["gate"].to(dtype)}
        expected, expected_state = _fused_truth(x, extra)
        keywords |= {"l2_norm": True, **extra}
    out, state = prefill(x, **keywords)
    assert out.dtype == dtype
    assert _error(out, expected) <= TOLERANCE[dtype]
    assert _error(state, expected_state) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("d_k", "d_v"), [(64, 128), (128, 32), (16, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_of_other_head_sizes(prefill: Prefill, d_k: int, d_v: int, dtype: torch.dtype) -> None:
    x = _inputs(prefill, 150, 2, 2, d_k, d_v).to(dtype)
    out, state = prefill(x)
    expected, expected_state = x.truth()
    assert _error(out, expected) <= TOLERANCE[dtype]
    assert _error(state, expected_state) <= TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_carried_over_calls_cut_at_random_gives_what_one_call_gives(
    prefill: Prefill, dtype: torch.dtype, seed: int
) -> None:
    x = _inputs(prefill, 333, batch=1 + seed % 2, v_heads=2, seed=seed).to(dtype)
    chosen = random.Random(seed)
    cuts = sorted(chosen.sample(range(1, 333), 1 + seed % 5))
    whole, whole_state = prefill(x)
    state, parts = x.state, []
    for first, last in zip((0, *cuts), (*cuts, 333), strict=True):
        out, state = prefill(replace(x.tokens(first, last), state=state))
        parts.append(out)
    assert _error(torch.cat(parts, dim=2), whole) <= TOLERANCE[dtype]
    assert _error(state, whole_state) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("every", "length"), [(1, 300), (2, 600)])
def test_a_checkpoint_is_bit_for_bit_the_state_of_a_run_to_there(
    prefill: Prefill, dtype: torch.dtype, every: int, length: int
) -> None:
    x = _inputs(prefill, length, v_heads=2).to(dtype)
    _, final, checkpoints = prefill(x, checkpoint_chunks=every, lnc=2)
    assert checkpoints.shape[2] == length // (every * CHUNK)
    for n in range(checkpoints.shape[2]):
        _, state = prefill(x.tokens(0, (n + 1) * every * CHUNK))
        assert torch.equal(checkpoints[:, :, n], state)
    assert torch.equal(final, prefill(x)[1])


@pytest.mark.parametrize("group", [1, 3])
def test_grouping_changes_no_bit(prefill: Prefill, group: int) -> None:
    x = _inputs(prefill, 600)
    for one, other in zip(prefill(x, group_chunks=group), prefill(x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("valid", [1, 129, 250])
def test_tokens_after_the_valid_ones_change_no_state(prefill: Prefill, valid: int) -> None:
    """Their gates may hold anything, even NaN: a select, not a product, removes them."""
    x = _inputs(prefill, 300, batch=2, v_heads=2)
    padded = replace(x, g=x.g.clone(), beta=x.beta.clone())
    padded.g[0, :, valid:] = float("nan")
    padded.beta[0, :, valid:] = float("inf")
    lengths = torch.tensor([[valid], [300]], dtype=torch.int32)
    out, state = prefill(padded, valid_len=lengths)
    short, short_state = prefill(x.tokens(0, valid))
    whole, whole_state = prefill(x)
    assert torch.equal(out[0, :, :valid], short[0])
    assert torch.equal(state[0], short_state[0])
    assert torch.equal(out[1], whole[1])
    assert torch.equal(state[1], whole_state[1])
