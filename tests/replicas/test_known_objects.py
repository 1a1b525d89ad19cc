"""How long a replica takes an object of the store for there."""

import pytest

from warmstate.cache_store.keys import ObjectKey
from warmstate.replicas.cache.known_objects import MAX_KNOWN_S, KnownObjects

KEY = ObjectKey("kv", bytes(32), bytes(32), 256)


@pytest.mark.parametrize(
    ("store_ttl_s", "ttl_s", "known_for_s"),
    [(86_400, None, MAX_KNOWN_S), (40, None, 10), (86_400, 40, 10), (40, 86_400, MAX_KNOWN_S)],
)
def test_nothing_is_taken_for_there_that_may_have_expired(
    store_ttl_s: int, ttl_s: int | None, known_for_s: float
) -> None:
    now = [0.0]
    known = KnownObjects(store_ttl_s, lambda: now[0])
    known.put(KEY, ttl_s)
    now[0] = known_for_s
    assert known.has(KEY)
    now[0] += 0.001
    assert not known.has(KEY)
