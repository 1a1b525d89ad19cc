"""Owns what a replica has lately seen in the shared store, so that it does not send it again. Knows no store."""

import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from warmstate.cache_store.keys import ObjectKey

_MAX_OBJECTS = 200_000
_KNOWN_FOR_S = 600.0


class KnownObjects:
    """Knowledge grows old because servers evict, expire and restart; a `put` of what is there costs one round trip and
    renews its time to live. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._seen_at: OrderedDict[ObjectKey, float] = OrderedDict()

    def has(self, key: ObjectKey) -> bool:
        with self._lock:
            seen_at = self._seen_at.get(key)
        return seen_at is not None and self._clock() - seen_at <= _KNOWN_FOR_S

    def put(self, key: ObjectKey) -> None:
        with self._lock:
            self._seen_at[key] = self._clock()
            self._seen_at.move_to_end(key)
            if len(self._seen_at) > _MAX_OBJECTS:
                self._seen_at.popitem(last=False)

    def remove(self, key: ObjectKey) -> None:
        with self._lock:
            self._seen_at.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._seen_at.clear()
