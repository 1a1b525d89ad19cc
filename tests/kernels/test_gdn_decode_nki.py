"""The NKI decode of the gated delta rule equals the token recurrence, in the simulator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from warmstate.kernels.gated_delta_torch import recurrence
from warmstate.kernels.norm_torch import l2_norm_, rms_norm

Decode = Callable[..., Any]
Tensors = dict[str, torch.Tensor]

D = 128
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _inputs(tokens: int, batch: int, k_heads: int, v_heads: int, dtype: torch.dtype, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "query": l2_norm_(normal(tokens, batch, k_heads, D)).to(dtype),
        "key": l2_norm_(normal(tokens, batch, k_heads, D)).to(dtype),
        "value": normal(tokens, batch, v_heads, D).to(dtype),
        "g": -torch.rand(tokens, batch, v_heads, generator=generator),
        "beta": torch.rand(tokens, batch, v_heads, generator=generator),
        "states": normal(batch + 2, v_heads, D, D),
    }


def _truth(x: Tensors, sequence: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = (x[name][:, sequence].float() for name in ("query", "key", "value", "g", "beta"))
    return recurrence(q * D**-0.5, k, v, g, beta, x["states"][slot])


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def decode(nki: Any) -> Decode:
    kernel = nki.kernel("gdn_decode_nki", "gdn_decode")

    def run(x: Tensors, slots: list[int], **keywords: Any) -> Any:
        where = torch.tensor(slots, dtype=torch.int32)
        names = ("query", "key", "value", "g", "beta", "states")
        given = {**x, "states": x["states"].transpose(1, 2).contiguous()}
        arguments = [given[name] for name in names]
        out, *states = kernel(*arguments, where, torch.eye(128), scale=D**-0.5, **keywords)
        return (out, *(state.transpose(-3, -2) for state in states))

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "k_heads", "v_heads"), [(1, 1, 1), (2, 2, 4), (3, 1, 3), (4, 2, 2), (5, 4, 16)])
def test_a_step_equals_the_recurrence_and_touches_only_its_slots(
    decode: Decode, batch: int, k_heads: int, v_heads: int, dtype: torch.dtype
) -> None:
    x = _inputs(1, batch, k_heads, v_heads, dtype)
    slots = [batch - i for i in range(batch)]
    out, states = decode(x, slots, lnc=1 + batch % 2)
    for i, slot in enumerate(slots):
        expected, expected_state = _truth(x, i, slot)
        assert _error(out[:, i], expected) <= TOLERANCE[dtype]
        assert _error(states[slot], expected_state) <= 1e-5
    for slot in (0, batch + 1):
        assert torch.equal(states[slot], x["states"][slot])


def test_verifying_gives_the_state_after_each_token(decode: Decode) -> None:
    x = _inputs(4, 3, 1, 2, torch.float32)
    out, states, steps = decode(x, [2, 0, 4], all_states=True)
    for i, slot in enumerate((2, 0, 4)):
        state = x["states"][slot]
        for token in range(4):
            one = {
                **{n: x[n][token : token + 1] for n in ("query", "key", "value", "g", "beta")},
                "states": state[None],
            }
            expected, state = _truth(one, i, 0)
            assert _error(out[token : token + 1, i], expected) <= 1e-5
            assert _error(steps[token, i], state) <= 1e-5
        assert torch.equal(steps[3, i], states[slot])


def test_a_slot_out_of_range_reads_zeros_and_writes_nothing(decode: Decode) -> None:
    x = _inputs(1, 2, 1, 2, torch.float32)
    out, states = decode(x, [99, -1])
    assert torch.equal(states, x["states"])
    fresh = {**x, "states": torch.zeros_like(x["states"])}
    assert _error(out[:, 0], _truth(fresh, 0, 0)[0]) <= 1e-5


def test_a_batch_mate_changes_no_bit(decode: Decode) -> None:
    x = _inputs(1, 3, 1, 2, torch.float32)
    out, states = decode(x, [0, 1, 2])
    alone = {n: (t[:, 1:2].contiguous() if n != "states" else t) for n, t in x.items()}
    out_alone, states_alone = decode(alone, [1])
    assert torch.equal(out[:, 1:2], out_alone)
    assert torch.equal(states[1], states_alone[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_form_equals_the_separate_operators(decode: Decode, dtype: torch.dtype) -> None:
    x = _inputs(2, 2, 1, 2, torch.float32)
    generator = torch.Generator().manual_seed(1)
    a_log, dt_bias = torch.randn(2, generator=generator), torch.randn(2, generator=generator)
    z, weight = torch.randn(2, 2, 2, D, generator=generator).to(dtype), 1 + 0.1 * torch.randn(D, generator=generator)
    raw = {**x, "query": (3 * x["query"]).to(dtype), "key": (2 * x["key"]).to(dtype), "value": x["value"].to(dtype)}
    raw["g"], raw["beta"] = 4 * x["g"] + 2, 4 * x["beta"] - 2
    out, states = decode(raw, [3, 1], l2_norm=True, a_log=a_log, dt_bias=dt_bias, gate=z, norm_weight=weight)
    plain = {**raw, "query": l2_norm_(raw["query"].float()), "key": l2_norm_(raw["key"].float())}
    plain["g"], plain["beta"] = -a_log.exp() * F.softplus(raw["g"] + dt_bias), raw["beta"].sigmoid()
    for i, slot in enumerate((3, 1)):
        expected, expected_state = _truth(plain, i, slot)
        normed = rms_norm(expected, weight, 1e-6) * F.silu(z[:, i].float())
        assert _error(out[:, i], normed) <= TOLERANCE[dtype]
        assert _error(states[slot], expected_state) <= 1e-5


def test_an_overflowing_rate_of_a_closed_gate_gives_no_nan(decode: Decode) -> None:
    x = _inputs(1, 1, 1, 1, torch.float32)
    x["g"][:] = -500.0
    out, states = decode(x, [0], a_log=torch.tensor([100.0]), dt_bias=torch.zeros(1))
    assert out.isfinite().all()
    assert states.isfinite().all()
