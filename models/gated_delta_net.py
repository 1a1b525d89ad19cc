"""Owns the Gated DeltaNet mixer: projections, conv, delta rule, gated norm. Knows no other layer.

HF `Qwen3NextGatedDeltaNet` / `Qwen3_5GatedDeltaNet`, with contiguous projections [q|k|v], z, b, a.
"""

import torch

from warmstate.kernels.causal_conv_torch import causal_conv
from warmstate.kernels.gated_delta_torch import TILE_ROWS, decode_step_, scan_tiles, tile_terms
from warmstate.kernels.norm_torch import l2_norm_, rms_norm
from warmstate.kernels.select import Kernels
from warmstate.models.backend import SequenceState, StateShapes
from warmstate.models.ranks import Communicator
from warmstate.models.state_pool import LayerState
from warmstate.models.step_layout import Capture, StepLayout
from warmstate.models.tile_layout import TileLayout

CapturedStates = dict[Capture, SequenceState]


class GatedDeltaNet:
    """The mixer of one linear_attention layer, with this rank's heads; `index` counts the GDN layers."""

    def __init__(
        self, weights: dict[str, torch.Tensor], shapes: StateShapes, index: int, eps: float, kernels: Kernels
    ) -> None:
        self._index = index
        self._eps = eps
        self._kernels = kernels
        self._num_k_heads, self._num_v_heads = shapes.num_k_heads, shapes.num_v_heads
        self._k_head_dim, self._v_head_dim = shapes.k_head_dim, shapes.v_head_dim
        self._dtype = shapes.dtype
        self._in_proj_qkv, self._in_proj_z = weights["in_proj_qkv"], weights["in_proj_z"]
        self._in_proj_gates = torch.cat((weights["in_proj_b"], weights["in_proj_a"]))
        self._taps = weights["conv"].float().t().contiguous()
        self._decay_rate = weights["A_log"].exp().neg_()
        self._dt_bias = weights["dt_bias"]
        self._norm = weights["norm"]
        self._out_proj = weights["out_proj"]

    def forward(
        self, x: torch.Tensor, layout: StepLayout, state: LayerState, captured: CapturedStates, ranks: Communicator
    ) -> torch.Tensor:
        """[T, H] float32 to [T, H]; advances `state` and fills the layer's part of `captured`."""
        inputs = self._convolve(self._project(x, self._in_proj_qkv), layout, state, captured)
        gates = self._gates(x)
        outputs = x.new_empty(layout.num_tokens, self._num_v_heads, self._v_head_dim)
        if layout.decode is not None:
            tokens = layout.decode.tokens
            states = layout.decode.take(state.recurrent)
            step = self._decode(inputs.index_select(0, tokens), gates.index_select(0, tokens), states)
            outputs.index_copy_(0, tokens, step)
            layout.decode.put(state.recurrent, states)
            self._capture_decoded(layout, state, captured)
        if layout.tiles is not None:
            self._run_tiles(inputs, gates, layout.tiles, state, captured, outputs)
        gate = self._kernels.pointwise.silu_(self._project(x, self._in_proj_z)).view_as(outputs)
        normed = rms_norm(outputs, self._norm, self._eps).mul_(gate)
        return ranks.all_reduce(self._project(normed.flatten(1), self._out_proj))

    def _project(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._kernels.linear(x, weight)

    def _gates(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 Hv]: beta and the log decay g of each value head."""
        b, a = self._project(x, self._in_proj_gates).chunk(2, dim=-1)
        pointwise = self._kernels.pointwise
        decay = pointwise.softplus(a + self._dt_bias).mul_(self._decay_rate)
        return torch.cat((pointwise.sigmoid(b), decay), dim=-1)

    def _convolve(
        self, projected: torch.Tensor, layout: StepLayout, state: LayerState, captured: CapturedStates
    ) -> torch.Tensor:
        """Conv and silu of the step's tokens, [T, channels] float32; conv inputs are rounded to the model's dtype."""
        conv = layout.conv
        channels = projected.shape[1]
        padded = projected.new_empty(conv.num_rows, channels)
        padded.index_copy_(0, conv.token_rows, projected.to(self._dtype).float())
        carry = state.conv.index_select(0, layout.slots)
        padded.index_copy_(0, conv.carry_rows, carry.view(-1, channels).float())
        self._put_conv(state.conv, layout.slots, padded, conv.tail_rows)
        if state.boundary_conv is not state.conv:
            self._put_conv(state.boundary_conv, conv.boundary_slots, padded, conv.boundary_rows)
        width = carry.shape[1]
        for capture, target in captured.items():
            target.conv[self._index].copy_(padded[capture.conv_row : capture.conv_row + width].t())
        return causal_conv(padded, self._taps, self._kernels.pointwise).index_select(0, conv.outputs)

    @staticmethod
    def _put_conv(target: torch.Tensor, slots: torch.Tensor, padded: torch.Tensor, rows: torch.Tensor) -> None:
        inputs = padded.index_select(0, rows).view(-1, *target.shape[1:])
        target.index_copy_(0, slots, inputs.to(target.dtype))

    def _decode(self, inputs: torch.Tensor, gates: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        q, k, v = self._split(inputs)
        beta, decay = gates.chunk(2, dim=-1)
        return decode_step_(self._normed_query(q), l2_norm_(k.contiguous()), v, decay, beta, states)

    def _run_tiles(
        self,
        inputs: torch.Tensor,
        gates: torch.Tensor,
        tiles: TileLayout,
        state: LayerState,
        captured: CapturedStates,
        outputs: torch.Tensor,
    ) -> None:
        tiled_inputs = self._fill_tiles(inputs, tiles, state.open_inputs)
        tiled_gates = self._fill_tiles(gates, tiles, state.open_gates)
        q, k, v = (x.view(tiles.num_tiles, TILE_ROWS, *x.shape[1:]).transpose(1, 2) for x in self._split(tiled_inputs))
        beta, decay = tiled_gates.view(tiles.num_tiles, TILE_ROWS, -1).transpose(1, 2).contiguous().chunk(2, dim=1)
        terms = tile_terms(self._normed_query(q), l2_norm_(k.contiguous()), v.contiguous(), decay, beta)
        states = state.recurrent.index_select(0, tiles.slots)
        tiled_outputs = outputs.new_empty(tiles.num_tiles, TILE_ROWS, self._num_v_heads, self._v_head_dim)
        for number, ordinal in enumerate(tiles.ordinals):
            read = scan_tiles(terms, ordinal, states)
            tiled_outputs[ordinal.first_tile : ordinal.first_tile + ordinal.num_tiles] = read.transpose(1, 2)
            for capture, target in captured.items():
                if capture.ordinal == number:
                    target.rec[self._index].copy_(states[capture.batch_index])
        state.recurrent.index_copy_(0, tiles.slots, states)
        outputs.index_copy_(0, tiles.tokens, tiled_outputs.flatten(0, 1).index_select(0, tiles.rows))

    @staticmethod
    def _fill_tiles(tokens: torch.Tensor, tiles: TileLayout, saved: torch.Tensor) -> torch.Tensor:
        """[tiles * 64, C]: the step's tokens and the saved rows of open blocks in place, zeros elsewhere."""
        filled = tokens.new_zeros(tiles.num_tiles * TILE_ROWS, tokens.shape[1])
        filled.index_copy_(0, tiles.rows, tokens.index_select(0, tiles.tokens))
        if tiles.lead_rows.numel():
            filled.index_copy_(0, tiles.lead_rows, saved.index_select(0, tiles.lead_saved))
        if tiles.open_rows.numel():
            saved.index_copy_(0, tiles.open_saved, filled.index_select(0, tiles.open_rows))
        return filled

    def _capture_decoded(self, layout: StepLayout, state: LayerState, captured: CapturedStates) -> None:
        for capture, target in captured.items():
            if capture.ordinal is None:
                target.rec[self._index].copy_(state.recurrent[layout.slots[capture.row]])

    def _split(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, channels] as q, k [N, Hk, dk] and v [N, Hv, dv]."""
        key = self._num_k_heads * self._k_head_dim
        heads = (len(inputs), self._num_k_heads, self._k_head_dim)
        values = (len(inputs), self._num_v_heads, self._v_head_dim)
        return inputs[:, :key].view(heads), inputs[:, key : 2 * key].view(heads), inputs[:, 2 * key :].view(values)

    def _normed_query(self, q: torch.Tensor) -> torch.Tensor:
        return l2_norm_(q.contiguous()).mul_(self._k_head_dim**-0.5)
