"""The NKI prefill of the gated delta rule equals the token recurrence, in the simulator."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from warmstate.kernels import gdn_constants
from warmstate.kernels.gated_delta_torch import recurrence
from warmstate.kernels.norm_torch import l2_norm_, rms_norm

Prefill = Callable[..., Any]

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 133, 255, 1000)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CHUNK = gdn_constants.CHUNK


@dataclass(frozen=True)
class Inputs:
    """q, k [B, Hk, S, dk], normalised; v [B, Hv, S, dv]; g, beta [B, Hv, S]; state [B, Hv, dk, dv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def tokens(self, first: int, last: int) -> "Inputs":
        cut = {name: getattr(self, name)[:, :, first:last].contiguous() for name in ("q", "k", "v", "g", "beta")}
        return replace(self, **cut)


def _inputs(length: int, batch: int = 1, ratio: int = 1, d_k: int = 128, d_v: int = 128, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (l2_norm_(normal(batch, 1, length, d_k)) for _ in range(2))
    g = -torch.rand(batch, ratio, length, generator=generator) * 0.2
    beta = torch.rand(batch, ratio, length, generator=generator)
    return Inputs(q, k, normal(batch, ratio, length, d_v), g, beta, normal(batch, ratio, d_k, d_v) * 0.3)


def _truth(x: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences and heads at once: the recurrence sees B * Hv independent heads."""
    ratio = x.v.shape[1] // x.k.shape[1]
    q, k = (t.float().repeat_interleave(ratio, dim=1).flatten(0, 1).transpose(0, 1) for t in (x.q, x.k))
    v, g, beta = (t.float().flatten(0, 1).transpose(0, 1) for t in (x.v, x.g, x.beta))
    out, state = recurrence(q * scale, k, v, g, beta, x.state.flatten(0, 1))
    return out.transpose(0, 1).reshape(x.v.shape), state.reshape(x.state.shape)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-20))


@pytest.fixture(scope="module")
def prefill(nki: Any) -> Prefill:
    kernel = nki.kernel("gdn_prefill_nki", "gdn_prefill")
    planes, pair_masks = gdn_constants.planes(), gdn_constants.pair_masks()

    def run(x: Inputs, **keywords: Any) -> Any:
        keywords.setdefault("initial_state", x.state.transpose(1, 2).contiguous())
        keywords.setdefault("scale", x.q.shape[-1] ** -0.5)
        out, final, *checkpoints = kernel(x.q, x.k, x.v, x.g, x.beta, planes, pair_masks, **keywords)
        return (out, final.transpose(1, 2), *(c.permute(0, 3, 1, 2, 4) for c in checkpoints))

    return run


def _cases() -> list[Any]:
    """Every pair of a length up to 133 and a batch, and with them every pair of the other properties."""
    cases = []
    for i, length in enumerate(LENGTHS):
        for batch in (1, 2, 3, 4) if length <= 133 else (2,):
            ratio = (i + batch) % 3 + 1
            dtype = torch.bfloat16 if (i // 3 + batch) % 2 else torch.float32
            cases.append(pytest.param(length, batch, ratio, dtype, id=f"{length}-b{batch}-1:{ratio}-{dtype}"))
    return cases


@pytest.mark.parametrize(("length", "batch", "ratio", "dtype"), _cases())
def test_prefill_equals_the_recurrence(
    prefill: Prefill, length: int, batch: int, ratio: int, dtype: torch.dtype
) -> None:
    x = _inputs(length, batch, ratio).to(dtype)
    out, state = prefill(x, lnc=1 + (length + batch) % 2)
    expected, expected_state = _truth(x, 128**-0.5)
    assert out.dtype == dtype
    assert _error(out, expected) <= TOLERANCE[dtype]
    assert _error(state, expected_state) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("d_k", "d_v"), [(64, 128), (128, 32), (16, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_of_other_head_sizes(prefill: Prefill, d_k: int, d_v: int, dtype: torch.dtype) -> None:
    x = _inputs(150, 2, 2, d_k, d_v).to(dtype)
    out, state = prefill(x)
    expected, expected_state = _truth(x, d_k**-0.5)
    assert _error(out, expected) <= TOLERANCE[dtype]
    assert _error(state, expected_state) <= TOLERANCE[dtype]


@pytest.mark.parametrize("cuts", [(128,), (77, 300), (1, 2, 3), (64, 128, 192, 256)])
def test_a_state_that_is_carried_over_calls_gives_what_one_call_gives(prefill: Prefill, cuts: tuple[int, ...]) -> None:
    x = _inputs(333, ratio=2)
    whole, whole_state = prefill(x)
    state, parts = x.state, []
    for first, last in zip((0, *cuts), (*cuts, 333), strict=True):
        out, state = prefill(replace(x.tokens(first, last), state=state))
        parts.append(out)
    assert _error(torch.cat(parts, dim=2), whole) <= 1e-5
    assert _error(state, whole_state) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("every", "length"), [(1, 300), (2, 600)])
def test_a_checkpoint_is_bit_for_bit_the_state_of_a_run_to_there(
    prefill: Prefill, dtype: torch.dtype, every: int, length: int
) -> None:
    x = _inputs(length, ratio=2).to(dtype)
    _, final, checkpoints = prefill(x, checkpoint_chunks=every, lnc=2)
    assert checkpoints.shape[2] == length // (every * CHUNK)
    for n in range(checkpoints.shape[2]):
        _, state = prefill(x.tokens(0, (n + 1) * every * CHUNK))
        assert torch.equal(checkpoints[:, :, n], state)
    assert torch.equal(final, prefill(x)[1])


@pytest.mark.parametrize("group", [1, 3])
def test_grouping_changes_no_bit(prefill: Prefill, group: int) -> None:
    x = _inputs(600)
    for one, other in zip(prefill(x, group_chunks=group), prefill(x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("valid", [1, 129, 250])
def test_tokens_after_the_valid_ones_change_no_state(prefill: Prefill, valid: int) -> None:
    """Their gates may hold anything, even NaN: a select, not a product, removes them."""
    x = _inputs(300, batch=2, ratio=2)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [128, 133])
def test_the_fused_front_end_and_epilogue_equal_the_separate_operators(
    prefill: Prefill, dtype: torch.dtype, length: int
) -> None:
    x = _inputs(length, batch=2, ratio=2)
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(2, 2, length, generator=generator) for _ in range(2))
    a_log, dt_bias = torch.randn(2, generator=generator), torch.randn(2, generator=generator)
    z, weight = (
        torch.randn(2, 2, length, 128, generator=generator).to(dtype),
        1 + 0.1 * torch.randn(128, generator=generator),
    )
    raw = replace(x, q=3 * x.q, k=5 * x.k, g=a, beta=b).to(dtype)
    out, state = prefill(raw, l2_norm=True, a_log=a_log, dt_bias=dt_bias, gate=z, norm_weight=weight)
    g = -a_log.exp()[:, None] * F.softplus(a + dt_bias[:, None])
    separate = replace(raw, q=l2_norm_(raw.q.float()), k=l2_norm_(raw.k.float()), g=g, beta=b.sigmoid())
    expected, expected_state = _truth(separate, 128**-0.5)
    expected = rms_norm(expected, weight, 1e-6) * F.silu(z.float())
    assert _error(out, expected) <= {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert _error(state, expected_state) <= TOLERANCE[dtype]


def test_gates_that_overflow_give_no_nan(prefill: Prefill) -> None:
    """exp(a_log) overflows where softplus is 0; 0 * inf must not become NaN."""
    x = _inputs(140)
    x.g[:] = -200.0
    x.g[:, :, ::7] = 5.0
    out, state = prefill(x, a_log=torch.tensor([100.0]), dt_bias=torch.zeros(1))
    assert out.isfinite().all()
    assert state.isfinite().all()


def _correlated(corr: float, beta: float, decay: float, length: int = 256) -> Inputs:
    x = _inputs(length, seed=5)
    shared = l2_norm_(torch.randn(1, 1, 1, 128, generator=torch.Generator().manual_seed(9)))
    k = l2_norm_(corr**0.5 * shared + (1 - corr) ** 0.5 * x.k)
    return replace(x, k=k, g=torch.full_like(x.g, -decay), beta=torch.full_like(x.beta, beta))


STABILITY = [(0, 0.5, 0.1), (0.5, 0.5, 0.01), (0.9, 0.5, 0.001), (0.9, 0.9, 0.001), (1.0, 1.0, 0.0)]


@pytest.mark.parametrize(("corr", "beta", "decay"), STABILITY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_correlated_keys_stay_accurate(
    prefill: Prefill, corr: float, beta: float, decay: float, dtype: torch.dtype
) -> None:
    _check_stable(prefill, _correlated(corr, beta, decay).to(dtype), dtype, 1e-5)


@pytest.mark.parametrize("beta", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_with_a_large_common_mean_stay_accurate(prefill: Prefill, beta: float, dtype: torch.dtype) -> None:
    """Mean 2.88 and spread 0.17, as image embeddings have: a series of powers of A explodes there."""
    x = _correlated(0, beta, 0.002)
    generator = torch.Generator().manual_seed(1)
    k, q = (l2_norm_(2.88 + 0.17 * torch.randn(x.k.shape, generator=generator)) for _ in range(2))
    _check_stable(prefill, replace(x, k=k, q=q).to(dtype), dtype, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strong_decay_does_not_overflow(prefill: Prefill, dtype: torch.dtype) -> None:
    """Mean |g| = 3: exp(-cumsum) alone is inf, and the state must not be wiped by 0 * inf."""
    x = _inputs(256, seed=2)
    g = -6.0 * torch.rand(x.g.shape, generator=torch.Generator().manual_seed(4))
    _check_stable(prefill, replace(x, g=g).to(dtype), dtype, 1e-4)


@pytest.mark.parametrize("g", [-1e-12, -27.6, -1000.0])
def test_extreme_gates_equal_the_recurrence(prefill: Prefill, g: float) -> None:
    x = _inputs(140)
    gates = torch.where(torch.arange(140) % 3 == 0, g, -0.01).expand_as(x.g).contiguous()
    _check_stable(prefill, replace(x, g=gates), torch.float32, 1e-4 if g < -1 else 1e-5)


def _check_stable(prefill: Prefill, x: Inputs, dtype: torch.dtype, float32_error: float) -> None:
    """The truth is float64: at these inputs the float32 recurrence is itself off."""
    doubled = replace(x, **{name: getattr(x, name).double() for name in ("g", "beta", "state")})
    out, state = prefill(x)
    q, k, v = (t.double().flatten(0, 1).transpose(0, 1) for t in (x.q, x.k, x.v))
    g, beta = (t.flatten(0, 1).transpose(0, 1) for t in (doubled.g, doubled.beta))
    expected, expected_state = recurrence(q * 128**-0.5, k, v, g, beta, doubled.state[0])
    bound = float32_error if dtype == torch.float32 else 5e-2
    assert _error(out, expected.transpose(0, 1)[None]) <= bound
    assert _error(state, expected_state[None]) <= bound
