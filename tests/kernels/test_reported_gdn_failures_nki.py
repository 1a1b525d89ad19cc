"""What users reported of other gated delta rule kernels, asked of ours in the simulator: numbers, NaN, leaking state.

Each docstring names the report, as in https://github.com/<owner>/<repo>/issues/<number>. The truth is float64.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from warmstate.kernels.norm_torch import l2_norm_

Prefill = Callable[..., Any]

D = 128
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _inputs(prefill: Any, length: int, batch: int = 1, seed: int = 5) -> Any:
    q, k = (l2_norm_(_normal(batch, 1, length, D, seed=seed + i)) for i in range(2))
    gates = torch.rand(2, batch, 1, length, generator=torch.Generator().manual_seed(seed))
    v, state = _normal(batch, 1, length, D, seed=seed + 2), 0.3 * _normal(batch, 1, D, D, seed=seed + 3)
    return prefill.inputs(q, k, v, -0.2 * gates[0], gates[1], state)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def _check(prefill: Prefill, x: Any, bound: float) -> None:
    for found, expected in zip(prefill(x), x.truth(), strict=True):
        assert _error(found, expected) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_realistic_qwen_gates_over_several_chunks_stay_coherent(prefill: Prefill, dtype: torch.dtype) -> None:
    """aws-neuron/neuronx-distributed-inference #164: a power series is incoherent with the gates of a real model.

    A_log and dt_bias as Qwen3-Next initialises them (A to 16, steps of 1e-3 to 0.1), and keys half alike.
    """
    x = _inputs(prefill, 640)
    rate, step = torch.tensor(9.0), torch.tensor(0.01)
    g = -rate * F.softplus(0.5 * _normal(*x.g.shape) + step.expm1().log())
    k = l2_norm_(0.7 * l2_norm_(_normal(1, 1, 1, D, seed=9)) + 0.7 * x.k)
    _check(prefill, replace(x, k=k, g=g, beta=(2 + _normal(*x.g.shape, seed=2)).sigmoid()).to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("beta", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_image_like_keys_with_a_large_common_mean_do_not_explode(
    prefill: Prefill, beta: float, dtype: torch.dtype
) -> None:
    """aws-neuron/neuronx-distributed-inference #179: "unstable on real vision embeddings", mean 2.88 and spread 0.17.

    All keys lie about 5 degrees from each other, so that most of W delta cancels: rounding these two to bfloat16, and
    nothing else, costs 2e-2 each (found in float64); 3.7e-2 was found in all.
    """
    x = _inputs(prefill, 256)
    q, k = (l2_norm_(2.88 + 0.17 * _normal(*x.k.shape, seed=s)) for s in (1, 2))
    x = replace(x, q=q, k=k, g=torch.full_like(x.g, -0.002), beta=torch.full_like(x.beta, beta))
    _check(prefill, x.to(dtype), {torch.float32: 1e-5, torch.bfloat16: 4.5e-2}[dtype])


@pytest.mark.parametrize(
    ("corr", "beta", "decay"), [(0, 0.5, 0.1), (0.5, 0.5, 0.01), (0.9, 0.5, 0.001), (0.9, 0.9, 0.001), (1.0, 1.0, 0.0)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_triangular_solve_does_not_lose_digits_with_correlated_keys(
    prefill: Prefill, corr: float, beta: float, decay: float, dtype: torch.dtype
) -> None:
    """fla-org/flash-linear-attention #537 (solve_tril explodes) and #640 (its precision).

    In bfloat16 the operands lose more digits the more alike the keys are: 1.2e-2 was found for equal ones.
    """
    x = _inputs(prefill, 256)
    k = l2_norm_(corr**0.5 * l2_norm_(_normal(1, 1, 1, D, seed=9)) + (1 - corr) ** 0.5 * x.k)
    x = replace(x, k=k, g=torch.full_like(x.g, -decay), beta=torch.full_like(x.beta, beta))
    _check(prefill, x.to(dtype), {torch.float32: 1e-5, torch.bfloat16: 1e-2 if corr < 0.9 else 1.5e-2}[dtype])


@pytest.mark.parametrize("length", [129, 133])
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_prompts_of_one_chunk_and_a_short_tail_give_no_nan(
    prefill: Prefill, length: int, dtype: torch.dtype
) -> None:
    """aws-neuron/neuronx-distributed-inference #152: NaN logits for repeated prompts of 129 and 133 tokens.

    Fresh memory is NaN in the simulator, so what the tail of a chunk holds cannot be luck.
    """
    x = _inputs(prefill, length).to(dtype)
    first, second = prefill(x), prefill(x)
    for found, again, expected in zip(first, second, x.truth(), strict=True):
        assert torch.equal(found, again)
        assert _error(found, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("g", [-1e-12, -27.6, -1000.0])
def test_a_decay_of_1e_minus_12_gives_no_nan(prefill: Prefill, g: float) -> None:
    """pytorch/executorch #21417 and #21439: exp(-cumsum) overflows where the decay is 1e-12, and 0 * inf is NaN.

    Decays that add up to 1000 leave 6e-5 of a float32 exponent; 1.1e-5 was found in the output.
    """
    x = _inputs(prefill, 140)
    gates = torch.where(torch.arange(140) % 3 == 0, g, -0.01).expand_as(x.g).contiguous()
    _check(prefill, replace(x, g=gates), 2e-5 if g < -1 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strong_decay_all_along_does_not_overflow(prefill: Prefill, dtype: torch.dtype) -> None:
    """pytorch/executorch #21417 again: mean |g| = 3, so that exp(-cumsum) alone is inf within one chunk."""
    x = _inputs(prefill, 256, seed=2)
    gates = -6.0 * torch.rand(x.g.shape, generator=torch.Generator().manual_seed(4))
    _check(prefill, replace(x, g=gates).to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("where", [0, 60, 127, 128])
def test_one_token_that_decays_everything_does_not_wipe_what_comes_after(prefill: Prefill, where: int) -> None:
    """tenstorrent/tt-metal #56550: exp(g_sum - g_0) * exp(g_0) is inf * 0 or 0 where one gate underflows."""
    x = _inputs(prefill, 200)
    gates = torch.full_like(x.g, -0.01)
    gates[:, :, where] = -120.0
    x = replace(x, g=gates)
    _check(prefill, x, 1e-5)
    assert prefill(x)[1].abs().max() > 0.1


def test_an_overflowing_rate_of_a_closed_gate_gives_no_nan(prefill: Prefill) -> None:
    """ohdearquant/lattice #314: exp(A_log) is inf where softplus is 0, and their product NaN."""
    x = _inputs(prefill, 140)
    x.g[:] = -200.0
    x.g[:, :, ::7] = 5.0
    out, state = prefill(x, a_log=torch.tensor([100.0]), dt_bias=torch.zeros(1))
    assert out.isfinite().all()
    assert state.isfinite().all()


def test_padding_of_a_single_sequence_is_not_taken_for_tokens(prefill: Prefill) -> None:
    """huggingface/transformers #46773: the padding mask was skipped for a batch of one."""
    x = _inputs(prefill, 200)
    short = x.tokens(0, 137)
    out, state = prefill(x, valid_len=torch.tensor([[137]], dtype=torch.int32))
    expected, expected_state = prefill(short)
    assert torch.equal(out[:, :, :137], expected)
    assert torch.equal(state, expected_state)
    assert not torch.equal(prefill(x)[1], state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_side_by_side_share_no_state(prefill: Prefill, dtype: torch.dtype) -> None:
    """THUDM/slime #1686: packed sequences leaked their state across the boundary between them."""
    x = _inputs(prefill, 140, batch=3).to(dtype)
    x.v[0], x.state[0] = 1e4, 1e4
    out, state = prefill(x, lnc=2)
    for i in range(3):
        alone = replace(x, **{name: getattr(x, name)[i : i + 1].contiguous() for name in x.__dataclass_fields__})
        alone_out, alone_state = prefill(alone)
        assert torch.equal(out[i : i + 1], alone_out)
        assert torch.equal(state[i : i + 1], alone_state)


@pytest.mark.parametrize("every", [1, 2])
def test_a_checkpoint_within_a_prefill_is_the_state_of_its_boundary_and_of_no_other(
    prefill: Prefill, every: int
) -> None:
    """sgl-project/sglang #39342, vllm-project/vllm #47861 and #53912: prefixes resumed from misaligned checkpoints.

    And sgl-project/sgl-kernel-npu #747: a kernel that returns no states between is of no use to a prefix cache.
    """
    x = _inputs(prefill, 530)
    whole, final, checkpoints = prefill(x, checkpoint_chunks=every)
    assert checkpoints.shape[2] == 530 // (128 * every)
    for n in range(checkpoints.shape[2]):
        boundary = 128 * every * (n + 1)
        state = checkpoints[:, :, n]
        assert _error(state, x.tokens(0, boundary).truth()[1]) <= 1e-5
        assert _error(state, x.tokens(0, boundary - 1).truth()[1]) > 1e-3
        resumed, resumed_final = prefill(replace(x.tokens(boundary, 530), state=state))
        assert _error(resumed, whole[:, :, boundary:]) <= 1e-5
        assert _error(resumed_final, final) <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_forward_of_all_tokens_equals_a_prefill_and_decodes(nki: Any, prefill: Prefill, dtype: torch.dtype) -> None:
    """huggingface/transformers #46190: logits 0.125 apart between the full forward and prefill with decode."""
    decode = nki.kernel("gdn_decode_nki", "gdn_decode")
    x = _inputs(prefill, 140, batch=2).to(dtype)
    whole, whole_state = prefill(x)
    _, state = prefill(x.tokens(0, 131))
    states = state.transpose(1, 2).contiguous()
    slots = torch.tensor([0, 1], dtype=torch.int32)
    for token in range(131, 140):
        one = [getattr(x, name)[:, :, token][None].contiguous() for name in ("q", "k", "v", "g", "beta")]
        out, states = decode(*one, states, slots, torch.eye(D), scale=D**-0.5)
        assert _error(out[0], whole[:, :, token]) <= TOLERANCE[dtype]
    assert _error(states.transpose(1, 2), whole_state) <= TOLERANCE[dtype]
