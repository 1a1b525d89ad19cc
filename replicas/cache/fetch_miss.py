"""Owns the word for a prefix that was asked of the store and did not come."""

from dataclasses import dataclass

from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.store import MissReason


@dataclass(frozen=True, slots=True)
class FetchMiss:
    """Why a prefix did not come; `key` is the object that was missing, short or bad, None when it was not an object."""

    reason: MissReason
    key: ObjectKey | None = None
    part: str | None = None

    def __str__(self) -> str:
        if self.key is None:
            return str(self.reason)
        return f"{self.reason} {self.key.kind} at {self.key.position}{f', part {self.part}' if self.part else ''}"
