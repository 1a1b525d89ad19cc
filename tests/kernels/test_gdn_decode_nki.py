"""The NKI decode of the gated delta rule equals the token recurrence, in the simulator."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from warmstate.kernels.gated_delta_torch import recurrence
from warmstate.kernels.nki_bench import Shape, bench
from warmstate.kernels.nki_sim.schedule import critical_path
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
    """The outputs and the last state of one sequence, in float64."""
    q, k, v, g, beta = (x[name][:, sequence].double() for name in ("query", "key", "value", "g", "beta"))
    return recurrence(q * D**-0.5, k, v, g, beta, x["states"][slot].double())


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def decode(nki: Any) -> Decode:
    """The kernel on a copy of the states, which it updates in place."""
    kernel = nki.kernel("gdn_decode_nki", "gdn_decode")

    def run(x: Tensors, slots: list[int], **keywords: Any) -> Any:
        where = torch.tensor(slots, dtype=torch.int32)
        names = ("query", "key", "value", "g", "beta", "states")
        given = {**x, "states": x["states"].transpose(1, 2).clone(memory_format=torch.contiguous_format)}
        arguments = [given[name] for name in names]
        out, *states = kernel(*arguments, where, torch.eye(128), scale=D**-0.5, **keywords)
        return (out, *(state.transpose(-3, -2) for state in states))

    return run


def _raw(x: Tensors) -> tuple[Tensors, Tensors]:
    """`x` as the projections give it, and what the fused front end and epilogue take."""
    generator = torch.Generator().manual_seed(1)
    heads, dtype = x["g"].shape[2], x["query"].dtype

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    raw = {**x, "query": 3 * x["query"], "key": 2 * x["key"], "g": normal(*x["g"].shape), "beta": normal(*x["g"].shape)}
    gate, norm_weight = normal(*x["value"].shape).to(dtype), 1 + 0.1 * normal(D)
    return raw, {"a_log": normal(heads), "dt_bias": normal(heads), "gate": gate, "norm_weight": norm_weight}


def _unfused(raw: Tensors, fused: Tensors) -> Tensors:
    """The decay and strength of raw projections, and normalised q and k, in float64."""
    doubled = {name: tensor.double() for name, tensor in raw.items()}
    g = -fused["a_log"].double().exp() * F.softplus(doubled["g"] + fused["dt_bias"].double())
    q, k = (l2_norm_(doubled[name]) for name in ("query", "key"))
    return {**doubled, "query": q, "key": k, "g": g, "beta": doubled["beta"].sigmoid()}


@pytest.mark.pairwise(
    tokens=(1, 2, 3, 4, 8),
    batch=(1, 2, 3, 4, 5),
    heads=((1, 1), (1, 2), (1, 3), (2, 2), (4, 16)),
    dtype=(torch.float32, torch.bfloat16),
    fused=(False, True),
    all_states=(False, True),
    lnc=(1, 2),
)
def test_decode_equals_the_recurrence_and_touches_only_its_slots(
    decode: Decode,
    tokens: int,
    batch: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    fused: bool,
    all_states: bool,
    lnc: int,
) -> None:
    """Multi-token calls are those that verify a draft. States are float32, whatever the dtype of the tokens."""
    x = _inputs(tokens, batch, *heads, dtype)
    keywords: dict[str, Any] = {"lnc": lnc, "all_states": all_states}
    plain: Tensors = x
    epilogue: Tensors = {}
    if fused:
        x, epilogue = _raw(x)
        plain = _unfused(x, epilogue)
        keywords |= {"l2_norm": True, **epilogue}
    slots = [batch - i for i in range(batch)]
    out, states, *steps = decode(x, slots, **keywords)
    assert out.dtype == dtype
    for i, slot in enumerate(slots):
        expected, expected_state = _truth(plain, i, slot)
        if fused:
            normed = rms_norm(expected, epilogue["norm_weight"].double(), 1e-6)
            expected = normed * F.silu(epilogue["gate"][:, i].double())
        assert _error(out[:, i], expected) <= TOLERANCE[dtype]
        assert _error(states[slot], expected_state) <= 1e-5
        if all_states:
            assert torch.equal(steps[0][-1, i], states[slot])
    for slot in (0, batch + 1):
        assert torch.equal(states[slot], x["states"][slot])


@pytest.mark.parametrize("seed", range(6))
def test_states_carried_over_calls_cut_at_random_give_what_one_call_gives(decode: Decode, seed: int) -> None:
    x = _inputs(9, 2, 1, 2, torch.float32, seed)
    whole, whole_states = decode(x, [3, 1])
    cuts = sorted(random.Random(seed).sample(range(1, 9), 1 + seed % 4))
    parts, states = [], x["states"]
    for first, last in zip((0, *cuts), (*cuts, 9), strict=True):
        some = {name: tensor[first:last].contiguous() for name, tensor in x.items() if name != "states"}
        out, states = decode({**some, "states": states}, [3, 1])
        parts.append(out)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(states, whole_states)


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


def test_an_overflowing_rate_of_a_closed_gate_gives_no_nan(decode: Decode) -> None:
    x = _inputs(1, 1, 1, 1, torch.float32)
    x["g"][:] = -500.0
    out, states = decode(x, [0], a_log=torch.tensor([100.0]), dt_bias=torch.zeros(1))
    assert out.isfinite().all()
    assert states.isfinite().all()


@pytest.mark.parametrize(("batch", "heads"), [(1, 4), (4, 4), (1, 16), (1, 32), (32, 4), (8, 32)])
def test_a_step_stays_within_twice_what_its_transfers_take(batch: int, heads: int) -> None:
    made = bench("gdn_decode", Shape(batch=batch, heads=heads), torch.bfloat16)
    assert made.floor is not None
    floor_us = made.floor.chain_us if batch * heads < 16 else made.floor.bytes_us
    for makespan_us in made.estimate.makespan_us:
        assert 1 < makespan_us / floor_us <= 2


def test_the_longest_chain_adds_up_to_the_makespan() -> None:
    made = bench("gdn_decode", Shape(batch=4, heads=4), torch.bfloat16)
    for rule in (0, 1):
        chain_us = sum(row[3] for row in critical_path(made.estimate.trace, rule))
        assert chain_us == pytest.approx(made.estimate.makespan_us[rule])


def test_heads_of_one_state_are_stored_without_waiting_for_each_other() -> None:
    made = bench("gdn_decode", Shape(batch=1, heads=16), torch.bfloat16)
    latencies = [row for row in critical_path(made.estimate.trace, 0) if row[:2] == ("dma-out", "latency")]
    assert [row[2] for row in latencies] == [1]
