"""Owns the host memory where preempted sequences leave their exact state. Knows no scheduler."""

import torch

from warmstate.models.backend import ModelBackend
from warmstate.replicas.cache.state_codec import state_bytes
from warmstate.replicas.sequence import KvSpan, LoadedPrefix, Sequence


class ParkingArea:
    """Exact states under a byte budget of their own, so that no cached prefix can push a sequence out."""

    def __init__(self, backend: ModelBackend, budget_bytes: int) -> None:
        self._backend = backend
        self._budget_bytes = budget_bytes
        self._parked: dict[Sequence, LoadedPrefix] = {}
        self.num_bytes = 0
        self.num_refused = 0

    def put(self, sequence: Sequence) -> None:
        """Copies the state of a running sequence, at the last position where it is exact; drops it if it cannot fit."""
        assert sequence.slot is not None, "only a running sequence can be parked"
        position = self._backend.state_position(sequence.slot)
        if position == 0:
            return
        shapes = self._backend.shapes
        if self.num_bytes + state_bytes(shapes, position) > self._budget_bytes:
            self.num_refused += 1
            return
        kv = torch.empty(shapes.kv_shape(position), dtype=shapes.dtype)
        self._backend.read_kv(sequence.block_table, 0, position, kv)
        state = self._backend.read_state(sequence.slot)
        parked = LoadedPrefix(position, state, (KvSpan(0, position, kv),), sequence.cache_source)
        self._parked[sequence] = parked
        self.num_bytes += parked.num_bytes

    def stats(self) -> dict[str, float]:
        """What is parked now, and how many states found no room since the start."""
        figures = (self.num_bytes, self._budget_bytes, self.num_refused)
        return dict(zip(("parked_bytes", "parked_budget_bytes", "parking_refused"), map(float, figures), strict=True))

    def find(self, sequence: Sequence) -> LoadedPrefix | None:
        return self._parked.get(sequence)

    def take(self, sequence: Sequence) -> LoadedPrefix | None:
        """Hands the state back and frees its place; None when the sequence is not parked."""
        parked = self._parked.pop(sequence, None)
        self.num_bytes -= parked.num_bytes if parked else 0
        return parked
