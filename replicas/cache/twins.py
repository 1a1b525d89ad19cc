"""Owns who is computing, fetching or copying which prefix right now, so that a second request can wait for it."""

from collections.abc import Sequence as Keys
from dataclasses import dataclass

from warmstate.models.backend import BLOCK_TOKENS
from warmstate.replicas.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class CopyInProgress:
    """What a sequence promised and has computed, but nobody can start from yet; outlives the sequence."""

    arrival: int


Leader = Sequence | CopyInProgress


class PendingPrefixes:
    """Prefix keys that a leader, most often a sequence, has promised to make usable. The first to promise leads."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, Leader] = {}
        self._promises: dict[Leader, set[bytes]] = {}

    def put(self, leader: Leader, key: bytes) -> None:
        """Promises the prefix of `key`, unless another sequence leads it already."""
        if self._leaders.setdefault(key, leader) is leader:
            self._promises.setdefault(leader, set()).add(key)

    def hand_over(self, leader: Sequence, key: bytes) -> CopyInProgress:
        """A sequence has computed the prefix of `key`: from now on its copy stands for the promise."""
        if self._leaders.get(key) is leader:
            del self._leaders[key]
            self._promises[leader].discard(key)
        copy = CopyInProgress(leader.arrival)
        self.put(copy, key)
        return copy

    def withdraw(self, leader: Leader) -> None:
        """Ends every promise of a sequence that stops, waits again, or has failed, or of a copy that has ended."""
        for key in self._promises.pop(leader, set()):
            del self._leaders[key]

    def find_leader(self, follower: Sequence, keys: Keys[bytes], deeper_than: int) -> Leader | None:
        """Whoever else promised the deepest of `keys` beyond `deeper_than` tokens."""
        if not self._leaders:
            return None
        for index in range(len(keys) - 1, deeper_than // BLOCK_TOKENS - 1, -1):
            leader = self._leaders.get(keys[index])
            if leader is not None and leader is not follower:
                return leader
        return None

    @property
    def is_empty(self) -> bool:
        return not self._leaders
