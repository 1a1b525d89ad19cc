"""The NKI causal convolution equals the torch one, in the simulator, and carries only valid inputs."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmstate.kernels.causal_conv_torch import causal_conv
from warmstate.kernels.pointwise_torch import FusedPointwise

Conv = Callable[..., Any]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

TAPS = 4
CARRY = TAPS - 1
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _inputs(batch: int, channels: int, length: int, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(batch, channels, length, generator=generator).to(dtype)
    taps = torch.randn(channels, TAPS, generator=generator)
    return x, taps, torch.randn(batch, channels, CARRY, generator=generator).to(dtype)


def _truth(x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    joined = torch.cat((state, x), dim=2).float()
    return torch.stack([causal_conv(row.T.contiguous(), taps.T.contiguous(), FusedPointwise()).T for row in joined])


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def prefill(nki: Any) -> Conv:
    kernel: Conv = nki.kernel("causal_conv_nki", "causal_conv_prefill")
    return kernel


@pytest.fixture(scope="module")
def step(nki: Any) -> Conv:
    """The kernel on a copy of the states, which it updates in place."""
    kernel = nki.kernel("causal_conv_nki", "causal_conv_step")

    def run(x: torch.Tensor, taps: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, **keywords: Any) -> Any:
        return kernel(x, taps, states.clone(), slots, **keywords)

    return run


@pytest.mark.pairwise(
    length=(1, 2, 3, 63, 64, 65, 127, 128, 129, 133, 255, 1000),
    batch=(1, 2, 3, 4),
    channels=(16, 64, 128, 130),
    dtype=(torch.float32, torch.bfloat16),
    tile=(64, 256, 1024),
    lnc=(1, 2),
)
def test_prefill_equals_the_truth_and_carries_the_last_inputs(
    prefill: Conv, length: int, batch: int, channels: int, dtype: torch.dtype, tile: int, lnc: int
) -> None:
    x, taps, state = _inputs(batch, channels, length, dtype)
    out, after = prefill(x, taps, state, tile_tokens=tile, lnc=lnc)
    assert out.dtype == dtype
    assert _error(out, _truth(x, taps, state)) <= TOLERANCE[dtype]
    assert torch.equal(after, torch.cat((state, x), dim=2)[:, :, -CARRY:])


@pytest.mark.parametrize("tile", [1, 2, 3, 64])
def test_tiles_change_no_bit(prefill: Conv, tile: int) -> None:
    x, taps, state = _inputs(1, 16, 70, torch.float32)
    assert torch.equal(prefill(x, taps, state, tile_tokens=tile)[0], prefill(x, taps, state)[0])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_carried_over_calls_cut_at_random_gives_what_one_call_gives(
    prefill: Conv, dtype: torch.dtype, seed: int
) -> None:
    """Cuts one token apart among them: then a state is made of inputs of several calls."""
    x, taps, state = _inputs(2, 16, 100, dtype)
    whole, whole_after = prefill(x, taps, state)
    cuts = sorted({1 + seed, 2 + seed, *random.Random(seed).sample(range(1, 100), 3)})
    parts = []
    for first, last in zip((0, *cuts), (*cuts, 100), strict=True):
        out, state = prefill(x[:, :, first:last].contiguous(), taps, state)
        parts.append(out)
    assert torch.equal(torch.cat(parts, dim=2), whole)
    assert torch.equal(state, whole_after)


def test_the_carry_out_is_that_of_the_valid_tokens_not_of_the_padding(prefill: Conv) -> None:
    x, taps, state = _inputs(5, 16, 40, torch.float32)
    valid = [0, 1, 2, 25, 40]
    _, after = prefill(x, taps, state, valid_len=torch.tensor(valid, dtype=torch.int32)[:, None])
    for i, count in enumerate(valid):
        expected = torch.cat((state[i], x[i, :, :count]), dim=1)[:, -CARRY:]
        assert torch.equal(after[i], expected)


def test_a_checkpoint_is_the_carry_out_of_a_run_to_there(prefill: Conv) -> None:
    x, taps, state = _inputs(2, 16, 300, torch.bfloat16)
    _, _, checkpoints = prefill(x, taps, state, checkpoint_tokens=128)
    assert checkpoints.shape[1] == 2
    for n in range(2):
        assert torch.equal(checkpoints[:, n], prefill(x[:, :, : 128 * (n + 1)].contiguous(), taps, state)[1])


@pytest.mark.pairwise(
    batch=(1, 2, 3, 4, 5), channels=(16, 64, 128, 256), dtype=(torch.float32, torch.bfloat16), lnc=(1, 2)
)
def test_a_step_continues_its_slot_and_no_other(
    step: Conv, batch: int, channels: int, dtype: torch.dtype, lnc: int
) -> None:
    x, taps, states = _inputs(2 * batch, channels, 1, dtype)
    slots = [2 * batch - 1 - 2 * i for i in range(batch)]
    others = [slot for slot in range(2 * batch) if slot not in slots]
    out, after = step(x[:batch, :, 0].contiguous(), taps, states, torch.tensor(slots, dtype=torch.int32), lnc=lnc)
    assert out.dtype == dtype
    assert _error(out, _truth(x[:batch], taps, states[slots])[:, :, 0]) <= TOLERANCE[dtype]
    assert torch.equal(after[slots], torch.cat((states[slots], x[:batch]), dim=2)[:, :, 1:])
    assert torch.equal(after[others], states[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_go_on_where_a_prefill_ended(prefill: Conv, step: Conv, dtype: torch.dtype) -> None:
    x, taps, state = _inputs(2, 64, 20, dtype)
    whole, whole_after = prefill(x, taps, state)
    _, states = prefill(x[:, :, :15].contiguous(), taps, state)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    for token in range(15, 20):
        out, states = step(x[:, :, token].contiguous(), taps, states, slots)
        assert _error(out, whole[:, :, token].float()) <= TOLERANCE[dtype]
    assert torch.equal(states, whole_after)


def test_a_slot_out_of_range_reads_zeros_and_writes_nothing(step: Conv) -> None:
    x, taps, states = _inputs(2, 64, 1, torch.float32)
    out, after = step(x[:, :, 0].contiguous(), taps, states, torch.tensor([2, -5], dtype=torch.int32))
    assert torch.equal(after, states)
    assert _error(out, _truth(x, taps, torch.zeros_like(states))[:, :, 0]) <= 1e-5
