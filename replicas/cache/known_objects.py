"""Owns what a replica has lately seen in the shared store, so that it does not send it again. Knows no store."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock

from warmstate.cache_store.keys import ObjectKey

_MAX_OBJECTS = 200_000
_KNOWN_FOR_S = 600.0

_Name = tuple[str, bytes, int]


class KnownObjects:
    """Of one namespace. Knowledge grows old because servers evict, expire and restart; a `put` of what is there costs
    one round trip and renews its time to live. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._seen_at: OrderedDict[_Name, float] = OrderedDict()

    def has(self, key: ObjectKey) -> bool:
        with self._lock:
            seen_at = self._seen_at.get(_name(key))
        return seen_at is not None and self._clock() - seen_at <= _KNOWN_FOR_S

    def put(self, key: ObjectKey) -> None:
        with self._lock:
            self._seen_at[_name(key)] = self._clock()
            self._seen_at.move_to_end(_name(key))
            if len(self._seen_at) > _MAX_OBJECTS:
                self._seen_at.popitem(last=False)

    def remove(self, key: ObjectKey) -> None:
        with self._lock:
            self._seen_at.pop(_name(key), None)

    def remove_segments(self, prefix_keys: Iterable[bytes]) -> None:
        """The KV segments of these prefix keys are gone."""
        with self._lock:
            for prefix_key in prefix_keys:
                self._seen_at.pop(("kv", prefix_key, 0), None)

    def clear(self) -> None:
        with self._lock:
            self._seen_at.clear()


def _name(key: ObjectKey) -> _Name:
    """The prefix key says the position too."""
    return key.kind, key.prefix, key.group
