"""The seam between the engine and whatever computes a step. Knows no scheduler, no cache and no sampler.

Canonical layout (no rank, no tensor-parallel degree in it):
    recurrent  float32  [gdn layers, v heads, dk, dv]
    conv       dtype    [gdn layers, channels in the order q|k|v, kernel - 1], the inputs just before `position`
    KV         dtype    [attention layers, kv heads, 2 (key, value), tokens, head_dim]
State is cut on a fixed grid of `StateShapes.num_head_groups` head groups, so that replicas of different degree share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

BLOCK_TOKENS = 64
"""Tokens per KV block and per GDN chunk; prefill is cut only at multiples of it."""

MAX_HEAD_GROUPS = 4


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


def floor_to_block(position: int) -> int:
    """The last block boundary at or before `position`."""
    return position // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class StateShapes:
    """Sizes of one sequence's state in the canonical layout; `dtype` is that of conv and KV, recurrent is float32."""

    num_gdn_layers: int
    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int
    num_attention_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_channels(self) -> int:
        """Conv channels: q and k of every key head, v of every value head."""
        return 2 * self.num_k_heads * self.k_head_dim + self.num_v_heads * self.v_head_dim

    @property
    def num_head_groups(self) -> int:
        """The fixed grid of head groups: the largest divisor of the key heads up to `MAX_HEAD_GROUPS`."""
        return math.gcd(self.num_k_heads, MAX_HEAD_GROUPS) if self.num_k_heads else 1

    def group_v_heads(self, group: int) -> slice:
        """The value heads of a head group."""
        share = self.num_v_heads // self.num_head_groups
        return slice(group * share, (group + 1) * share)

    def group_channels(self, group: int) -> tuple[slice, slice, slice]:
        """The q, k and v channel ranges of a head group within [q|k|v]."""
        keys = self.num_k_heads * self.k_head_dim
        k_share, v_share = keys // self.num_head_groups, self.num_v_heads * self.v_head_dim // self.num_head_groups
        q = slice(group * k_share, (group + 1) * k_share)
        k = slice(keys + q.start, keys + q.stop)
        return q, k, slice(2 * keys + group * v_share, 2 * keys + (group + 1) * v_share)

    def rec_shape(self, num_v_heads: int | None = None) -> tuple[int, int, int, int]:
        return (self.num_gdn_layers, num_v_heads or self.num_v_heads, self.k_head_dim, self.v_head_dim)

    def conv_shape(self, num_channels: int | None = None) -> tuple[int, int, int]:
        return (self.num_gdn_layers, num_channels or self.num_channels, self.conv_kernel - 1)

    def kv_shape(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        return (self.num_attention_layers, self.num_kv_heads, 2, num_tokens, self.head_dim)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence's share of a step: `count` new tokens at positions [start, start + count).

    `block_table[i]` is the KV block of positions [64 i, 64 i + 64); it covers start + count tokens. `checkpoint_after`
    lists positions in (start, start + count], multiples of 64, whose state the step must hand out.
    """

    sequence_id: int
    slot: int
    start: int
    count: int
    block_table: npt.NDArray[np.int32]
    sample: bool
    checkpoint_after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotRestore:
    """A slot that begins this step at `position`: zeroed when 0, else already filled by `write_state`."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step, plain data that can be sent to every rank. `frees` are slots given up since the last step."""

    step_id: int
    rows: tuple[PlanRow, ...]
    restores: tuple[SlotRestore, ...] = ()
    frees: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A copy of one sequence's GDN state at `position`, canonical layout, contiguous, on the host."""

    position: int
    rec: torch.Tensor
    conv: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`logits` float32 [rows with sample, vocab] in plan order; `states_at` one state per (row index, position).

    The states are copies, and the caller's to keep.
    """

    logits: torch.Tensor
    states_at: dict[tuple[int, int], SequenceState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """What the engine may use: live sequences, KV blocks (block 0 is never handed out), longest sequence.

    `max_prefill_splits` is how many states within one prompt a backend should be asked for, where each costs a call of
    its own; None where they cost nothing.
    """

    num_slots: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_prefill_splits: int | None = None


class ModelBackend(Protocol):
    """Blocking; called from the engine thread only, but for `read_kv`.

    Implementations: `torch_backend.TorchBackend`; Neuron later.
    """

    @property
    def shapes(self) -> StateShapes: ...

    @property
    def limits(self) -> BackendLimits: ...

    @property
    def deterministic(self) -> bool:
        """Whether a token's result depends on nothing but its prefix, bit for bit (implied by float32)."""
        ...

    def forward(self, plan: StepPlan, tokens: npt.NDArray[np.int32]) -> StepOutput:
        """Computes one ragged batch; `tokens` [plan.num_tokens] are the rows' new tokens in plan order."""
        ...

    def reset_slot(self, slot: int) -> None:
        """Zeroes a slot: an empty prefix, position 0."""
        ...

    def state_position(self, slot: int) -> int:
        """The position at which `read_state` is valid: the sequence's end, or its last block boundary where the
        backend keeps the open block as inputs (deterministic mode)."""
        ...

    def read_state(self, slot: int) -> SequenceState:
        """Copies the slot's state at `state_position(slot)`."""
        ...

    def write_state(self, slot: int, state: SequenceState) -> None:
        """Fills a slot; the sequence continues at `state.position`."""
        ...

    def read_kv(self, blocks: Sequence[int], start: int, stop: int, out: torch.Tensor) -> None:
        """Copies the KV of positions [start, stop) of a sequence with block table `blocks` into `out` (kv_shape).

        From any thread and beside a step, if the blocks are full and somebody holds them: nothing writes to those.
        """
        ...

    def write_kv(self, blocks: Sequence[int], start: int, stop: int, source: torch.Tensor) -> None:
        """Writes the KV of positions [start, stop) from `source` (kv_shape of stop - start tokens)."""
        ...
