"""The GDN kernels hand their state to each other: prefill, then decode, is one sequence; neighbours do not leak."""

from typing import Any

import pytest
import torch

from warmstate.kernels import gdn_constants
from warmstate.kernels.norm_torch import l2_norm_

D = 128
CONSTANTS = (gdn_constants.planes(), gdn_constants.pair_masks())


def _tokens(length: int, batch: int, heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v [B, H, S, 128] and g, beta [B, H, S]."""
    generator = torch.Generator().manual_seed(3)
    vectors = [torch.randn(batch, heads, length, D, generator=generator) for _ in range(3)]
    gates = [torch.rand(batch, heads, length, generator=generator) for _ in range(2)]
    return [*(l2_norm_(x).to(dtype) for x in vectors[:2]), vectors[2].to(dtype), -0.3 * gates[0], gates[1]]


def _cut(tokens: list[torch.Tensor], first: int, last: int) -> list[torch.Tensor]:
    return [x[:, :, first:last].contiguous() for x in tokens]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_decode_continues_prefill(nki: Any, dtype: torch.dtype, bound: float) -> None:
    prefill = nki.kernel("gdn_prefill_nki", "gdn_prefill")
    decode = nki.kernel("gdn_decode_nki", "gdn_decode")
    tokens = _tokens(134, 2, 2, dtype)
    whole, whole_state = prefill(*tokens, *CONSTANTS, scale=D**-0.5)
    _, state = prefill(*_cut(tokens, 0, 130), *CONSTANTS, scale=D**-0.5)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    rest = [x.movedim(2, 0).contiguous() for x in _cut(tokens, 130, 134)]
    out, state = decode(*rest, state, slots, torch.eye(D), scale=D**-0.5)
    assert _error(out.movedim(0, 2), whole[:, :, 130:]) <= bound
    assert _error(state, whole_state) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_neighbour_changes_no_bit_of_a_prefill(nki: Any, dtype: torch.dtype) -> None:
    prefill = nki.kernel("gdn_prefill_nki", "gdn_prefill")
    tokens = _tokens(140, 3, 2, dtype)
    out, state = prefill(*tokens, *CONSTANTS, scale=D**-0.5, lnc=2)
    alone, alone_state = prefill(*(x[1:2].contiguous() for x in tokens), *CONSTANTS, scale=D**-0.5)
    assert torch.equal(out[1:2], alone)
    assert torch.equal(state[1:2], alone_state)


def test_a_zeroed_state_is_noticed(nki: Any) -> None:
    """Else no test of carried state would mean anything."""
    prefill = nki.kernel("gdn_prefill_nki", "gdn_prefill")
    tokens = _tokens(160, 1, 1, torch.float32)
    whole, _ = prefill(*tokens, *CONSTANTS, scale=D**-0.5)
    late, _ = prefill(*_cut(tokens, 130, 160), *CONSTANTS, scale=D**-0.5)
    assert _error(late[:, :, :8], whole[:, :, 130:138]) > 0.1
