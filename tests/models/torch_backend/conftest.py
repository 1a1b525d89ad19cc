"""Drives a `TorchBackend` as an engine would: slots, blocks, restores and plans, without any policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from warmstate.models.backend import BLOCK_TOKENS, PlanRow, SequenceState, SlotRestore, StepOutput, StepPlan
from warmstate.models.torch_backend import TorchBackend

Tokens = Sequence[int]


@dataclass
class LiveSequence:
    """One sequence: its slot, its blocks, and how far it has come."""

    number: int
    slot: int
    position: int = 0
    blocks: list[int] = field(default_factory=list)
    restored: bool = False


class Driver:
    """Runs ragged steps; every sampled row gives the logits of its last token."""

    def __init__(self, backend: TorchBackend) -> None:
        self.backend = backend
        self._free_slots = list(range(backend.limits.num_slots))
        self._free_blocks = list(range(1, backend.limits.num_blocks))
        self._frees: list[int] = []
        self._count = 0

    def open(self) -> LiveSequence:
        self._count += 1
        return LiveSequence(self._count, self._free_slots.pop())

    def close(self, sequence: LiveSequence) -> None:
        self._free_slots.append(sequence.slot)
        self._free_blocks.extend(sequence.blocks)
        self._frees.append(sequence.slot)

    def step(
        self, *work: tuple[LiveSequence, Tokens], checkpoints: dict[int, tuple[int, ...]] | None = None
    ) -> StepOutput:
        """One step; `checkpoints` maps an index of `work` to positions."""
        rows = [self._row(sequence, tokens) for sequence, tokens in work]
        for index, positions in (checkpoints or {}).items():
            rows[index] = replace(rows[index], checkpoint_after=positions)
        restores = tuple(SlotRestore(s.slot, s.position) for s, _ in work if not s.restored)
        plan = StepPlan(0, tuple(rows), restores, tuple(self._frees))
        self._frees = []
        ids = np.concatenate([np.asarray(tokens, dtype=np.int32) for _, tokens in work])
        output = self.backend.forward(plan, ids)
        for sequence, tokens in work:
            sequence.position += len(tokens)
            sequence.restored = True
        return output

    def prefill(self, sequence: LiveSequence, tokens: Tokens, chunk: int = 1 << 20) -> torch.Tensor:
        """Feeds the tokens in chunks; returns the logits [vocab] after the last."""
        for start in range(0, len(tokens), chunk):
            output = self.step((sequence, tokens[start : start + chunk]))
        return output.logits[0]

    def all_logits(self, tokens: Tokens) -> torch.Tensor:
        """Logits [T, vocab] after every token, fed one by one."""
        sequence = self.open()
        logits = torch.stack([self.step((sequence, [token])).logits[0] for token in tokens])
        self.close(sequence)
        return logits

    def restore(self, state: SequenceState, kv: torch.Tensor) -> LiveSequence:
        """A new sequence that continues at the state's position."""
        sequence = self.open()
        self._grow(sequence, state.position)
        self.backend.write_state(sequence.slot, state)
        self.backend.write_kv(sequence.blocks, 0, state.position, kv)
        sequence.position = state.position
        return sequence

    def copy_kv(self, sequence: LiveSequence, stop: int) -> torch.Tensor:
        out = torch.full(self.backend.shapes.kv_shape(stop), float("nan"), dtype=self.backend.shapes.dtype)
        self.backend.read_kv(sequence.blocks, 0, stop, out)
        return out

    def _row(self, sequence: LiveSequence, tokens: Tokens) -> PlanRow:
        self._grow(sequence, sequence.position + len(tokens))
        table = np.array(sequence.blocks, dtype=np.int32)
        return PlanRow(sequence.number, sequence.slot, sequence.position, len(tokens), table, sample=True)

    def _grow(self, sequence: LiveSequence, num_tokens: int) -> None:
        while len(sequence.blocks) * BLOCK_TOKENS < num_tokens:
            sequence.blocks.append(self._free_blocks.pop())


MakeDriver = Callable[..., Driver]


@pytest.fixture
def make_driver() -> MakeDriver:
    """`make_driver(path, dtype=float32, deterministic=False, num_slots=8, num_blocks=160)`; memory holds NaN."""

    def make(
        path: Path,
        dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        num_slots: int = 8,
        num_blocks: int = 160,
    ) -> Driver:
        backend = TorchBackend.load(path, dtype, deterministic, num_slots, num_blocks, max_model_len=4096)
        poison(backend)
        return Driver(backend)

    return make


def poison(backend: TorchBackend) -> None:
    """Fills every KV block and slot with NaN through the seam: only what a step itself writes may be read."""
    shapes, limits = backend.shapes, backend.limits
    blocks = range(1, limits.num_blocks)
    nan_kv = torch.full(shapes.kv_shape(BLOCK_TOKENS), float("nan"), dtype=shapes.dtype)
    for block in blocks:
        backend.write_kv([block], 0, BLOCK_TOKENS, nan_kv)
    rec, conv = torch.full(shapes.rec_shape(), float("nan")), torch.full(shapes.conv_shape(), float("nan"))
    for slot in range(limits.num_slots):
        backend.write_state(slot, SequenceState(0, rec, conv.to(shapes.dtype)))


@pytest.fixture
def random_tokens() -> Callable[[int, int], list[int]]:
    """`random_tokens(count, seed)`: ids below 96, the vocabulary of the tiny checkpoints."""

    def make(count: int, seed: int = 0) -> list[int]:
        return [int(token) for token in np.random.default_rng(seed).integers(2, 96, count)]

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The models are tiny: more threads only wait for each other."""
    torch.set_num_threads(1)
