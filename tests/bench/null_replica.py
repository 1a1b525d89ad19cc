"""A replica whose model computes nothing, so that only the way of a request to its engine and back is left to measure.

Everything else is the product's: ingress, router, replica, engine thread, scheduler, sampler, store.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from warmstate.cluster.replica_deployment import ReplicaDeployment
from warmstate.models.backend import (
    BLOCK_TOKENS,
    BackendLimits,
    SequenceState,
    StateShapes,
    StepOutput,
    StepPlan,
)
from warmstate.models.checkpoints.loading import Progress
from warmstate.models.checkpoints.preflight import CheckpointSummary
from warmstate.replicas.config import ReplicaConfig

TOKEN = 70
"""What the null model always says."""


class NullBackend:
    """A `ModelBackend` that always says `TOKEN` and whose states are zero."""

    deterministic = True

    def __init__(self, config: ReplicaConfig, summary: CheckpointSummary) -> None:
        engine = config.engine
        self.shapes: StateShapes = summary.config.state_shapes(config.dtype)
        self.limits = BackendLimits(
            engine.max_sequences,
            engine.kv_tokens // BLOCK_TOKENS + 1,
            engine.max_model_len,
            summary.config.vocab_size,
        )
        self._positions: dict[int, int] = {}
        self._logits = torch.zeros(engine.max_sequences, self.limits.vocab_size)
        self._logits[:, TOKEN] = 1.0

    def forward(self, plan: StepPlan, tokens: npt.NDArray[np.int32]) -> StepOutput:
        for row in plan.rows:
            self._positions[row.slot] = row.start + row.count
        states = {
            (index, position): self._zero_state(position)
            for index, row in enumerate(plan.rows)
            for position in row.checkpoint_after
        }
        return StepOutput(self._logits[: sum(row.sample for row in plan.rows)], states)

    def reset_slot(self, slot: int) -> None:
        self._positions[slot] = 0

    def state_position(self, slot: int) -> int:
        return self._positions[slot] // BLOCK_TOKENS * BLOCK_TOKENS

    def read_state(self, slot: int) -> SequenceState:
        return self._zero_state(self.state_position(slot))

    def write_state(self, slot: int, state: SequenceState) -> None:
        self._positions[slot] = state.position

    def read_kv(self, blocks: Sequence[int], start: int, stop: int, out: torch.Tensor) -> None:
        out.zero_()

    def write_kv(self, blocks: Sequence[int], start: int, stop: int, source: torch.Tensor) -> None:
        """The null model has no KV to write."""

    def _zero_state(self, position: int) -> SequenceState:
        conv = torch.zeros(self.shapes.conv_shape(), dtype=self.shapes.dtype)
        return SequenceState(position, torch.zeros(self.shapes.rec_shape()), conv)


class NullExecutor:
    """One rank of the null model."""

    def __init__(self, config: ReplicaConfig, summary: CheckpointSummary, progress: Progress) -> None:
        self.backend = NullBackend(config, summary)
        progress(1, 1)

    def close(self) -> None:
        """Nothing is held."""


class NullReplica(ReplicaDeployment):
    """A replica deployment over the null model."""

    def load_executor(self, config: ReplicaConfig, summary: CheckpointSummary, progress: Progress) -> NullExecutor:
        return NullExecutor(config, summary, progress)
