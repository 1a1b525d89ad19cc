"""Owns what a replica has lately seen in the shared store, so that it does not send it again. Knows no store."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock

from warmstate.cache_store.keys import ObjectKey

_MAX_OBJECTS = 200_000
MAX_KNOWN_S = 600.0
_KNOWN_SHARE = 0.25
"""Of the time that an object was put for: what is known to be there must not have expired since."""

_Name = tuple[str, bytes, int]


class KnownObjects:
    """Of one namespace. Knowledge grows old because servers evict, expire and restart; a `put` of what is there costs
    one round trip and renews its time to live. `ttl_s` is the store's own. Thread-safe."""

    def __init__(self, ttl_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = Lock()
        self._known_until: OrderedDict[_Name, float] = OrderedDict()

    def has(self, key: ObjectKey) -> bool:
        with self._lock:
            until = self._known_until.get(_name(key))
        return until is not None and self._clock() <= until

    def put(self, key: ObjectKey, ttl_s: int | None = None) -> None:
        """It was put for `ttl_s`, None: for as long as the store wants, or was seen."""
        known_for_s = min(MAX_KNOWN_S, _KNOWN_SHARE * (self._ttl_s if ttl_s is None else ttl_s))
        with self._lock:
            self._known_until[_name(key)] = self._clock() + known_for_s
            self._known_until.move_to_end(_name(key))
            if len(self._known_until) > _MAX_OBJECTS:
                self._known_until.popitem(last=False)

    def remove(self, key: ObjectKey) -> None:
        with self._lock:
            self._known_until.pop(_name(key), None)

    def remove_segments(self, prefix_keys: Iterable[bytes]) -> None:
        """The KV segments of these prefix keys are gone."""
        with self._lock:
            for prefix_key in prefix_keys:
                self._known_until.pop(("kv", prefix_key, 0), None)

    def clear(self) -> None:
        with self._lock:
            self._known_until.clear()


def _name(key: ObjectKey) -> _Name:
    """The prefix key says the position too."""
    return key.kind, key.prefix, key.group
