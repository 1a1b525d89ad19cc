"""Owns one rank's live model on torch: slots, KV blocks, and the step. The embedded `ModelBackend`.

Two modes. Fast: rows of one token take the recurrent step, others 64-row tiles; a slot's state stands at the sequence's
end. Deterministic: every row is computed within the tile of its absolute block, products have a multiple of 16 rows and
keys come in absolute tiles, so that a token's bits depend on nothing but its prefix; a slot's state stands at the last
block boundary, with the open block's inputs beside it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from warmstate.kernels.select import select_kernels
from warmstate.models.backend import (
    BLOCK_TOKENS,
    BackendLimits,
    SequenceState,
    StateShapes,
    StepOutput,
    StepPlan,
    blocks_for,
    floor_to_block,
)
from warmstate.models.checkpoints.loading import Progress, load_weights
from warmstate.models.config import read_config
from warmstate.models.errors import BackendError
from warmstate.models.gated_delta_net import CapturedStates
from warmstate.models.kv_pool import KvPool
from warmstate.models.qwen_hybrid import QwenHybrid
from warmstate.models.ranks import RankGroups, RankSlice
from warmstate.models.state_pool import StatePool
from warmstate.models.step_checks import check_blocks, check_slot, check_step
from warmstate.models.step_layout import build_step_layout


class TorchBackend:
    """A `ModelBackend` on the CPU. Shapes are those of this rank's heads; all of them when there is one rank."""

    def __init__(
        self, model: QwenHybrid, num_slots: int, num_blocks: int, max_model_len: int, deterministic: bool
    ) -> None:
        """`model` must have been built with kernels for the same mode (`select_kernels(dtype, deterministic)`)."""
        self._model = model
        self._deterministic = deterministic
        self._limits = BackendLimits(num_slots, num_blocks, max_model_len, model.config.vocab_size)
        self._states = StatePool(model.shapes, num_slots, keep_open=deterministic)
        self._kv = KvPool(model.shapes, num_blocks)
        self._positions: list[int | None] = [None] * num_slots

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype,
        deterministic: bool,
        num_slots: int,
        num_blocks: int,
        max_model_len: int,
        progress: Progress | None = None,
        ranks: RankSlice | None = None,
        groups: RankGroups | None = None,
    ) -> "TorchBackend":
        """Loads a checkpoint directory that has passed preflight. float32 implies deterministic mode."""
        deterministic = deterministic or dtype == torch.float32
        config = read_config(path)
        ranks = ranks or RankSlice()
        weights = load_weights(path, config, ranks, dtype, progress)
        model = QwenHybrid(config, weights, dtype, select_kernels(dtype, deterministic), ranks, groups)
        return cls(model, num_slots, num_blocks, max_model_len, deterministic)

    @property
    def shapes(self) -> StateShapes:
        return self._model.shapes

    @property
    def limits(self) -> BackendLimits:
        return self._limits

    @property
    def deterministic(self) -> bool:
        return self._deterministic

    def forward(self, plan: StepPlan, tokens: npt.NDArray[np.int32]) -> StepOutput:
        self._prepare_slots(plan)
        check_step(plan, tokens, self._limits, self._positions)
        layout = build_step_layout(plan, self.shapes, self._model.num_heads, self._deterministic)
        self._kv.clear(layout.fresh_blocks)
        captured: CapturedStates = {capture: self._states.new_state(capture.position) for capture in layout.captures}
        ids = torch.from_numpy(tokens.astype(np.int64))
        logits = self._model.forward(ids, layout, self._states, self._kv, captured)
        for row in plan.rows:
            self._positions[row.slot] = row.start + row.count
        return StepOutput(logits, {(capture.row, capture.position): state for capture, state in captured.items()})

    def reset_slot(self, slot: int) -> None:
        check_slot(slot, self._limits, "reset")
        self._states.reset(slot)
        self._positions[slot] = 0

    def state_position(self, slot: int) -> int:
        check_slot(slot, self._limits, "state_position")
        position = self._positions[slot]
        if position is None:
            raise BackendError(f"slot {slot} was freed or never restored, so it has no position")
        return floor_to_block(position) if self._deterministic else position

    def read_state(self, slot: int) -> SequenceState:
        return self._states.read(slot, self.state_position(slot))

    def write_state(self, slot: int, state: SequenceState) -> None:
        check_slot(slot, self._limits, "write_state")
        expected = (self.shapes.rec_shape(), self.shapes.conv_shape())
        if (tuple(state.rec.shape), tuple(state.conv.shape)) != expected:
            raise BackendError(f"slot {slot}: state {state.rec.shape}, {state.conv.shape} given, {expected} expected")
        if self._deterministic and state.position % BLOCK_TOKENS:
            raise BackendError(
                f"slot {slot}: in deterministic mode a state stands at a multiple of {BLOCK_TOKENS}, "
                f"not at {state.position}"
            )
        self._states.write(slot, state)
        self._positions[slot] = state.position

    def read_kv(self, blocks: Sequence[int], start: int, stop: int, out: torch.Tensor) -> None:
        self._check_kv("read_kv", blocks, start, stop, out)
        self._kv.read(blocks, start, stop, out)

    def write_kv(self, blocks: Sequence[int], start: int, stop: int, source: torch.Tensor) -> None:
        self._check_kv("write_kv", blocks, start, stop, source)
        self._kv.write(blocks, start, stop, source)

    def _prepare_slots(self, plan: StepPlan) -> None:
        """Frees, then restores. A slot freed since the last step and given out again has been written already."""
        restored = {restore.slot for restore in plan.restores}
        for slot in plan.frees:
            check_slot(slot, self._limits, f"step {plan.step_id}, frees")
            if slot not in restored:
                self._positions[slot] = None
        for restore in plan.restores:
            if restore.position == 0:
                self.reset_slot(restore.slot)
                continue
            check_slot(restore.slot, self._limits, f"step {plan.step_id}, restores")
            if self._positions[restore.slot] != restore.position:
                raise BackendError(
                    f"step {plan.step_id}: slot {restore.slot} stands at {self._positions[restore.slot]}; "
                    f"write_state must bring it to {restore.position} first"
                )

    def _check_kv(self, what: str, blocks: Sequence[int], start: int, stop: int, tensor: torch.Tensor) -> None:
        needed = blocks_for(stop)
        if not 0 <= start <= stop or len(blocks) < needed:
            raise BackendError(f"{what}: {len(blocks)} blocks do not hold positions [{start}, {stop})")
        check_blocks(np.asarray(blocks[start // BLOCK_TOKENS : needed], dtype=np.int32), self._limits, what)
        expected = self.shapes.kv_shape(stop - start)
        if tuple(tensor.shape) != expected:
            raise BackendError(f"{what}: a tensor of shape {tuple(tensor.shape)} was given, {expected} is expected")
