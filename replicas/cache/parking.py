"""Owns the host memory lent to living sequences: where preempted ones leave their exact state, and where the end of an
output is held until it is known to be the end. Knows no scheduler."""

import torch

from warmstate.models.backend import ModelBackend, SequenceState
from warmstate.replicas.cache.state_codec import state_bytes
from warmstate.replicas.sequence import KvSpan, LoadedPrefix, Sequence


class ParkingArea:
    """Exact states under a byte budget of their own, so that no cached prefix can push a sequence out. Open outputs
    have what parked sequences leave free."""

    def __init__(self, backend: ModelBackend, budget_bytes: int) -> None:
        self._backend = backend
        self._budget_bytes = budget_bytes
        self._parked: dict[Sequence, LoadedPrefix] = {}
        self._outputs: dict[Sequence, SequenceState] = {}
        self._output_bytes = state_bytes(backend.shapes, 0)
        self._parked_bytes = 0
        self._num_refused = 0
        self._num_outputs_refused = 0

    @property
    def num_bytes(self) -> int:
        return self._parked_bytes + len(self._outputs) * self._output_bytes

    def stats(self) -> dict[str, float]:
        """Bytes held now; what found no room since the start."""
        return {
            "parked_bytes": float(self._parked_bytes),
            "parked_budget_bytes": float(self._budget_bytes),
            "parking_refused": float(self._num_refused),
            "open_output_bytes": float(len(self._outputs) * self._output_bytes),
            "open_outputs_refused": float(self._num_outputs_refused),
        }

    def put(self, sequence: Sequence) -> None:
        """Copies the state of a running sequence, at the last position where it is exact; drops it if it cannot fit."""
        assert sequence.slot is not None, "only a running sequence can be parked"
        position = self._backend.state_position(sequence.slot)
        if position == 0:
            return
        shapes = self._backend.shapes
        num_bytes = state_bytes(shapes, position)
        if self._parked_bytes + num_bytes > self._budget_bytes:
            self._num_refused += 1
            return
        while self.num_bytes + num_bytes > self._budget_bytes:
            del self._outputs[next(iter(self._outputs))]
            self._num_outputs_refused += 1
        kv = torch.empty(shapes.kv_shape(position), dtype=shapes.dtype)
        self._backend.read_kv(sequence.block_table, 0, position, kv)
        state = self._backend.read_state(sequence.slot)
        parked = LoadedPrefix(position, state, (KvSpan(0, position, kv),), sequence.cache_source)
        self._parked[sequence] = parked
        self._parked_bytes += parked.num_bytes

    def find(self, sequence: Sequence) -> LoadedPrefix | None:
        return self._parked.get(sequence)

    def take(self, sequence: Sequence) -> LoadedPrefix | None:
        """Hands the state back and frees its place; None when the sequence is not parked."""
        parked = self._parked.pop(sequence, None)
        self._parked_bytes -= parked.num_bytes if parked else 0
        return parked

    def put_output(self, sequence: Sequence, state: SequenceState) -> None:
        """Holds the state at the last boundary of an output instead of the one before; not where there is no room."""
        self._outputs.pop(sequence, None)
        if self.num_bytes + self._output_bytes > self._budget_bytes:
            self._num_outputs_refused += 1
            return
        self._outputs[sequence] = state

    def take_output(self, sequence: Sequence) -> SequenceState | None:
        """The state at the last boundary of the output; None when none was passed, or held."""
        return self._outputs.pop(sequence, None)
