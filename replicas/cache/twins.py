"""Owns who is computing or fetching which prefix right now, so that a second request can wait for it."""

from collections.abc import Sequence as Keys

from warmstate.models.backend import BLOCK_TOKENS
from warmstate.replicas.sequence import Sequence


class PendingPrefixes:
    """Prefix keys that a sequence, the leader, has promised to make usable. The first to promise leads."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, Sequence] = {}
        self._promises: dict[Sequence, set[bytes]] = {}

    def put(self, leader: Sequence, key: bytes) -> None:
        """Promises the prefix of `key`, unless another sequence leads it already."""
        if self._leaders.setdefault(key, leader) is leader:
            self._promises.setdefault(leader, set()).add(key)

    def keep(self, leader: Sequence, key: bytes) -> None:
        """Ends one promise: the prefix is usable now, or will not be."""
        if self._leaders.get(key) is leader:
            del self._leaders[key]
            self._promises[leader].discard(key)

    def withdraw(self, leader: Sequence) -> None:
        """Ends every promise of a sequence that stops, waits again, or has failed."""
        for key in self._promises.pop(leader, set()):
            del self._leaders[key]

    def find_leader(self, follower: Sequence, keys: Keys[bytes], deeper_than: int) -> Sequence | None:
        """Another sequence that promised the deepest of `keys` beyond `deeper_than` tokens."""
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
