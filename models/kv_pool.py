"""Owns the attention KV of all sequences in blocks of 64 tokens, and its canonical layout. Knows no sequence."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from warmstate.models.backend import BLOCK_TOKENS, StateShapes, blocks_for


class KvPool:
    """`pages` [layers, 2 (key, value), blocks * kv heads, 64, head_dim]; block 0 holds zeros and belongs to nobody.

    The memory is not touched before it is written, so the operating system gives it as it is used. A block that is
    begun but not filled is zeroed first, because attention multiplies what lies behind a sequence's end by 0.
    """

    def __init__(self, shapes: StateShapes, num_blocks: int) -> None:
        self._heads = shapes.num_kv_heads
        layers, head_dim = shapes.num_attention_layers, shapes.head_dim
        self.pages = torch.empty(layers, 2, num_blocks * self._heads, BLOCK_TOKENS, head_dim, dtype=shapes.dtype)
        self._blocks = self.pages.view(layers, 2, num_blocks, self._heads, BLOCK_TOKENS, head_dim)
        self._blocks[:, :, 0].zero_()
        self._raw = _raw(self._blocks)

    def clear(self, blocks: torch.Tensor) -> None:
        """Zeroes whole blocks."""
        for block in blocks.tolist():
            self._blocks[:, :, block].zero_()

    def put_tokens(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [T, kv heads, head_dim] at the rows `rows` [T * kv heads] of all pages."""
        head_dim = keys.shape[-1]
        for part, tokens in enumerate((keys, values)):
            flat = self.pages[layer, part].view(-1, head_dim)
            flat.index_copy_(0, rows, tokens.reshape(-1, head_dim).to(flat.dtype))

    def read(self, blocks: Sequence[int], start: int, stop: int, out: torch.Tensor) -> None:
        """Copies positions [start, stop) into `out` [layers, kv heads, 2, tokens, head_dim].

        By one thread, numpy's way: torch would take the cores from the step that runs beside this.
        """
        raw_out = _raw(out)
        for block, at, rows in _pieces(blocks, start, stop):
            piece = self._raw[:, :, block, :, rows.start : rows.stop]
            np.copyto(raw_out[:, :, :, at : at + len(rows)], piece.swapaxes(1, 2))

    def write(self, blocks: Sequence[int], start: int, stop: int, source: torch.Tensor) -> None:
        """Writes positions [start, stop) from `source`, laid out as `out` of `read`."""
        for block, at, rows in _pieces(blocks, start, stop):
            if rows.start == 0 and rows.stop < BLOCK_TOKENS:
                self._blocks[:, :, block].zero_()
            piece = source[:, :, :, at : at + len(rows)].transpose(1, 2)
            self._blocks[:, :, block, :, rows.start : rows.stop] = piece


def _raw(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """The same memory as integers; numpy knows no bfloat16."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()


def _pieces(blocks: Sequence[int], start: int, stop: int) -> list[tuple[int, int, range]]:
    """(block, offset within [start, stop), rows of the block) for each block that the positions touch."""
    pieces = []
    for index in range(start // BLOCK_TOKENS, blocks_for(stop)):
        first = max(start, index * BLOCK_TOKENS)
        last = min(stop, (index + 1) * BLOCK_TOKENS)
        pieces.append((blocks[index], first - start, range(first - index * BLOCK_TOKENS, last - index * BLOCK_TOKENS)))
    return pieces
