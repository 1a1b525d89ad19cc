"""Owns the live GDN state of every slot: recurrent, conv inputs and, in deterministic mode, the open block's rows."""

import torch

from warmstate.kernels.gated_delta_torch import TILE_ROWS
from warmstate.models.backend import SequenceState, StateShapes


class LayerState:
    """One layer's share. `recurrent` [slots, Hv, dk, dv] float32, `conv` [slots, K - 1, channels] in the model's dtype.

    In deterministic mode `recurrent` stands at the last block boundary, `boundary_conv` holds the conv inputs before
    that boundary, and `open_inputs` [slots * 64, channels] and `open_gates` [slots * 64, 2 * Hv] what the open block's
    tokens gave the delta rule.
    """

    def __init__(self, shapes: StateShapes, num_slots: int, keep_open: bool) -> None:
        heads, channels = shapes.num_v_heads, shapes.num_channels
        self.recurrent = torch.zeros(num_slots, heads, shapes.k_head_dim, shapes.v_head_dim)
        self.conv = torch.zeros(num_slots, shapes.conv_kernel - 1, channels, dtype=shapes.dtype)
        self.boundary_conv = torch.zeros_like(self.conv) if keep_open else self.conv
        num_open = num_slots * TILE_ROWS if keep_open else 0
        self.open_inputs = torch.empty(num_open, channels)
        self.open_gates = torch.empty(num_open, 2 * heads)


def slot_bytes(shapes: StateShapes, keep_open: bool) -> int:
    """Bytes that one slot takes, over all layers."""
    with torch.device("meta"):
        layer = LayerState(shapes, 1, keep_open)
    # Without open blocks the two conv tensors are one.
    tensors: set[torch.Tensor] = set(vars(layer).values())
    return shapes.num_gdn_layers * sum(tensor.nbytes for tensor in tensors)


class StatePool:
    """The slots of all GDN layers, read and written in the canonical layout."""

    def __init__(self, shapes: StateShapes, num_slots: int, keep_open: bool) -> None:
        self._shapes = shapes
        self.layers = [LayerState(shapes, num_slots, keep_open) for _ in range(shapes.num_gdn_layers)]

    def new_state(self, position: int) -> SequenceState:
        """An uninitialised state in the canonical layout."""
        conv = torch.empty(self._shapes.conv_shape(), dtype=self._shapes.dtype)
        return SequenceState(position, torch.empty(self._shapes.rec_shape()), conv)

    def reset(self, slot: int) -> None:
        for layer in self.layers:
            layer.recurrent[slot].zero_()
            layer.conv[slot].zero_()
            layer.boundary_conv[slot].zero_()

    def read(self, slot: int, position: int) -> SequenceState:
        state = self.new_state(position)
        for i, layer in enumerate(self.layers):
            state.rec[i].copy_(layer.recurrent[slot])
            state.conv[i].copy_(layer.boundary_conv[slot].t())
        return state

    def write(self, slot: int, state: SequenceState) -> None:
        for i, layer in enumerate(self.layers):
            layer.recurrent[slot].copy_(state.rec[i])
            layer.conv[slot].copy_(state.conv[i].t())
            layer.boundary_conv[slot].copy_(state.conv[i].t())
