"""The tile form and the decode step of the gated delta rule equal the token recurrence."""

import pytest
import torch

from warmstate.kernels.gated_delta_torch import TILE_ROWS, TileOrdinal, decode_step_, recurrence, scan_tiles, tile_terms
from warmstate.kernels.norm_torch import l2_norm_

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

HEADS = [(2, 2, 8, 8), (2, 4, 16, 8), (1, 3, 8, 20)]
"""Key heads, value heads, dk, dv."""


def _inputs(length: int, heads: tuple[int, int, int, int], seed: int = 0) -> Inputs:
    k_heads, v_heads, d_k, d_v = heads
    generator = torch.Generator().manual_seed(seed)
    q = l2_norm_(torch.randn(length, k_heads, d_k, generator=generator)) * d_k**-0.5
    k = l2_norm_(torch.randn(length, k_heads, d_k, generator=generator))
    v = torch.randn(length, v_heads, d_v, generator=generator)
    g = -torch.rand(length, v_heads, generator=generator) * 0.2
    return q, k, v, g, torch.rand(length, v_heads, generator=generator)


def _state(heads: tuple[int, int, int, int]) -> torch.Tensor:
    return torch.randn(heads[1:], generator=torch.Generator().manual_seed(7))


def _tiled(inputs: Inputs, lead: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one sequence that starts at row `lead` of its first tile."""
    length = len(inputs[0])
    num_tiles = -(-(lead + length) // TILE_ROWS)
    padded = []
    for x in inputs:
        tiles = x.new_zeros(num_tiles * TILE_ROWS, *x.shape[1:])
        tiles[lead : lead + length] = x
        padded.append(tiles.view(num_tiles, TILE_ROWS, *x.shape[1:]).transpose(1, 2))
    states = state[None].clone()
    terms = tile_terms(*padded)
    outputs = torch.cat([scan_tiles(terms, TileOrdinal(i, 1, 1), states) for i in range(num_tiles)])
    return outputs.transpose(1, 2).flatten(0, 1)[lead : lead + length], states[0]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 1000])
def test_tiles_equal_the_recurrence(heads: tuple[int, int, int, int], length: int) -> None:
    inputs, state = _inputs(length, heads), _state(heads)
    expected, expected_state = recurrence(*inputs, state)
    for lead in (0, 37):
        outputs, after = _tiled(inputs, lead, state)
        torch.testing.assert_close(outputs, expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(after, expected_state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("decay", [0.5, 1.45, 3.0, 30.0, 300.0])
def test_a_state_that_decays_to_nothing_equals_the_recurrence_and_makes_no_subnormal_numbers(decay: float) -> None:
    heads = HEADS[1]
    q, k, v, g, beta = _inputs(200, heads)
    inputs = (q, k, v, g * decay / 0.1, beta)
    expected, expected_state = recurrence(*inputs, _state(heads))
    outputs, after = _tiled(inputs, 0, _state(heads))
    torch.testing.assert_close(outputs, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after, expected_state, atol=2e-5, rtol=1e-4)
    terms = tile_terms(*(x[:TILE_ROWS].transpose(0, 1)[None] for x in inputs))
    smallest = torch.finfo(torch.float32).tiny
    for term in (terms.u, terms.w_and_reads, terms.scores, terms.writes, terms.total_decay):
        assert not ((term != 0) & (term.abs() < smallest)).any()


@pytest.mark.parametrize("heads", HEADS)
def test_the_decode_step_equals_the_recurrence_for_every_sequence_of_the_batch(
    heads: tuple[int, int, int, int],
) -> None:
    sequences = [_inputs(1, heads, seed) for seed in range(5)]
    states = torch.stack([_state(heads) * (i + 1) for i in range(5)])
    expected = [recurrence(*inputs, state) for inputs, state in zip(sequences, states, strict=True)]
    q, k, v, g, beta = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    outputs = decode_step_(q, k, v, g, beta, states)
    torch.testing.assert_close(outputs, torch.cat([o for o, _ in expected]))
    torch.testing.assert_close(states, torch.stack([s for _, s in expected]))


def test_an_open_tile_reads_the_state_and_leaves_it_unchanged() -> None:
    heads = HEADS[1]
    tiles = [x.view(2, TILE_ROWS, *x.shape[1:]).transpose(1, 2) for x in _inputs(2 * TILE_ROWS, heads)]
    before = torch.stack((_state(heads), _state(heads)))
    states = before.clone()
    outputs = scan_tiles(tile_terms(*tiles), TileOrdinal(0, 2, 1), states)
    closed_states = before.clone()
    assert torch.equal(outputs, scan_tiles(tile_terms(*tiles), TileOrdinal(0, 2, 2), closed_states))
    assert torch.equal(states[1], before[1])
    assert torch.equal(states[0], closed_states[0])


def test_rows_after_a_token_change_no_bit_of_its_output() -> None:
    inputs = [x.clone() for x in _inputs(TILE_ROWS, HEADS[1])]
    whole, _ = _tiled(tuple(inputs), 0, _state(HEADS[1]))  # type: ignore[arg-type]
    for length in (1, 17, 63):
        part, _ = _tiled(tuple(x[:length] for x in inputs), 0, _state(HEADS[1]))  # type: ignore[arg-type]
        assert torch.equal(part, whole[:length])
