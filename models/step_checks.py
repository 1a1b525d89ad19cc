"""Owns what a step plan must respect: live slots at the right position, good blocks, whole checkpoints."""

import numpy as np
import numpy.typing as npt

from warmstate.models.backend import BLOCK_TOKENS, BackendLimits, PlanRow, StepPlan, blocks_for
from warmstate.models.errors import BackendError


def check_step(
    plan: StepPlan, tokens: npt.NDArray[np.int32], limits: BackendLimits, slot_positions: list[int | None]
) -> None:
    """Raises `BackendError` before anything is computed if the plan contradicts the slots or limits."""
    if not plan.rows or len(tokens) != plan.num_tokens:
        raise BackendError(f"step {plan.step_id}: {len(tokens)} tokens given for {plan.num_tokens} planned")
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        raise BackendError(f"step {plan.step_id}: token ids must lie in [0, {limits.vocab_size})")
    for row in plan.rows:
        where = f"step {plan.step_id}, sequence {row.sequence_id}, slot {row.slot}"
        _check_row(row, limits, slot_positions, where)
    _check_unique("slot", np.array([row.slot for row in plan.rows]), plan.step_id)
    written = [row.block_table[row.start // BLOCK_TOKENS : _num_blocks(row)] for row in plan.rows]
    _check_unique("written block", np.concatenate(written), plan.step_id)


def check_slot(slot: int, limits: BackendLimits, where: str) -> None:
    """Raises `BackendError` for a slot that does not exist."""
    if not 0 <= slot < limits.num_slots:
        raise BackendError(f"{where}: slot {slot} is out of range; there are {limits.num_slots}")


def check_blocks(blocks: npt.NDArray[np.int32], limits: BackendLimits, where: str) -> None:
    """Raises `BackendError` for a block id that was never handed out; block 0 belongs to nobody."""
    if len(blocks) and (blocks.min() < 1 or blocks.max() >= limits.num_blocks):
        raise BackendError(f"{where}: block ids must lie in [1, {limits.num_blocks}), got {blocks.tolist()}")


def _check_row(row: PlanRow, limits: BackendLimits, slot_positions: list[int | None], where: str) -> None:
    check_slot(row.slot, limits, where)
    position = slot_positions[row.slot]
    if position is None:
        raise BackendError(f"{where}: the slot was freed or never restored")
    if position != row.start:
        raise BackendError(f"{where}: the slot stands at position {position}, the row starts at {row.start}")
    end = row.start + row.count
    if row.count < 1 or end > limits.max_model_len:
        raise BackendError(f"{where}: positions [{row.start}, {end}) must lie in [0, {limits.max_model_len})")
    if len(row.block_table) < _num_blocks(row):
        raise BackendError(f"{where}: {len(row.block_table)} blocks do not cover {end} tokens")
    check_blocks(row.block_table[: _num_blocks(row)], limits, where)
    if any(not row.start < p <= end or p % BLOCK_TOKENS for p in row.checkpoint_after):
        raise BackendError(
            f"{where}: checkpoints {row.checkpoint_after} must be multiples of {BLOCK_TOKENS} in ({row.start}, {end}]"
        )


def _num_blocks(row: PlanRow) -> int:
    return blocks_for(row.start + row.count)


def _check_unique(what: str, ids: npt.NDArray[np.int_] | npt.NDArray[np.int32], step_id: int) -> None:
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise BackendError(f"step {step_id}: {what} {values[counts > 1].tolist()} is used by two rows")
