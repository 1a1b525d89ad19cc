"""Owns the look at what other namespaces have indexed of a prompt, for counting only. Blocking: never on a step's path.

The chain of prefix keys holds no namespace, so that a fleet of two versions can tell that it computes things twice.
"""

import time
from collections.abc import Callable, Sequence

import redis

from warmstate.cache_store.index_loader import read_namespaces
from warmstate.cache_store.index_rows import decode_checkpoint
from warmstate.cache_store.names import IndexNames, short_namespace
from warmstate.cache_store.redis_client import StoreAddress, open_client

_MAX_NAMESPACES = 4
_MAX_KEYS = 512
_RELIST_AFTER_S = 30.0
_RETRY_AFTER_S = 30.0
_MIN_PERIOD_S = 0.1


class OtherNamespaces:
    """Asks the index server, at most ten times a second; a prompt that comes in between counts as known to nobody."""

    def __init__(self, address: StoreAddress, namespace: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = open_client(address, max_connections=1)
        self._own = short_namespace(namespace)
        self._clock = clock
        self._others: list[IndexNames] = []
        self._listed_at_s = -_RELIST_AFTER_S
        self._may_ask_at_s = 0.0

    def find_deepest(self, keys: Sequence[bytes]) -> int:
        """The deepest position at the last boundaries of `keys` that the index of another namespace has; 0 when none
        has, or the server does not answer."""
        now = self._clock()
        if not keys or now < self._may_ask_at_s:
            return 0
        self._may_ask_at_s = now + _MIN_PERIOD_S
        try:
            if now - self._listed_at_s >= _RELIST_AFTER_S:
                self._relist(now)
            return max((self._deepest_in(names, keys[-_MAX_KEYS:]) for names in self._others), default=0)
        except (redis.RedisError, OSError):
            self._may_ask_at_s = now + _RETRY_AFTER_S
            return 0

    def close(self) -> None:
        self._client.close()

    def _relist(self, now: float) -> None:
        """The namespaces whose replicas told of themselves last."""
        namespaces = read_namespaces(self._client)
        others = sorted(namespaces.keys() - {self._own}, key=lambda short: namespaces[short][1], reverse=True)
        self._others = [IndexNames(short) for short in others[:_MAX_NAMESPACES]]
        self._listed_at_s = now

    def _deepest_in(self, names: IndexNames, keys: Sequence[bytes]) -> int:
        rows = self._client.hmget(names.checkpoints, list(keys))
        for key, row in zip(reversed(keys), reversed(rows), strict=True):
            checkpoint = decode_checkpoint(key, row) if isinstance(row, bytes) else None
            if checkpoint is not None:
                return checkpoint.position
        return 0
