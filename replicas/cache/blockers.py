"""Owns the reasons why a prompt was not resumed deeper. Pure; knows no engine and no store."""

from dataclasses import dataclass
from enum import StrEnum

from warmstate.cache_store.store import MissReason
from warmstate.replicas.cache.fetch_miss import FetchMiss


class Blocker(StrEnum):
    """What a longer hit lacked. The last three are of prefixes that nobody could have resumed here."""

    KV = "kv"
    RECURRENT = "recurrent"
    CONV = "conv"
    STORE = "store"
    NOT_FETCHED = "not_fetched"
    SALT = "salt"
    NAMESPACE = "namespace"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What was known of a prompt's path when it began to run; positions in tokens.

    `limit` is the deepest boundary that leaves a token to compute, `num_cached` where the sequence began. `num_kv`
    tokens of KV were here without a gap; `num_state` is the deepest checkpoint that was here, with or without its KV.
    `num_stored` is the deepest prefix that the store was known to have, `fetch_miss` why it did not come.
    """

    limit: int
    num_cached: int
    num_kv: int = 0
    num_state: int = 0
    num_stored: int = 0
    fetch_miss: FetchMiss | None = None


@dataclass(frozen=True, slots=True)
class Blocked:
    """Tokens that were not resumed, and the one reason for them."""

    blocker: Blocker
    num_tokens: int


def blocked_here(facts: PathFacts) -> list[Blocked]:
    """What blocked each stretch that this replica or its store knew of, the shallowest stretch first.

    A stretch goes to the reason that was found closest to a hit: a prefix whose fetch failed, then one that was not
    fetched, then a state without its KV, then KV without a state.
    """
    found: list[Blocked] = []
    start = facts.num_cached
    for end, blocker in (
        (facts.num_stored, _of_store(facts.fetch_miss)),
        (facts.num_state, Blocker.KV),
        (facts.num_kv, Blocker.RECURRENT),
    ):
        end = min(end, facts.limit)
        if end > start:
            found.append(Blocked(blocker, end - start))
            start = end
    return found


def _of_store(miss: FetchMiss | None) -> Blocker:
    if miss is None:
        return Blocker.NOT_FETCHED
    if miss.key is None:
        return Blocker.STORE
    if miss.key.kind == "kv":
        return Blocker.KV
    return Blocker.CONV if miss.part == "conv" and miss.reason is MissReason.CORRUPT else Blocker.RECURRENT
