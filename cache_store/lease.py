"""Owns who may evict: a lease that ends by itself, and a token that shuts out a holder that has slept through its end.

Knows nothing of what is evicted. Blocking; every call may raise the client's errors.

The token of a later holder is larger. Before a holder works on a namespace it writes its token there, as its fence, and
whatever it changes it changes in a transaction that ends when the fence is not its own (Kleppmann 2016, "How to do
distributed locking"). The fence shares the slot of the namespace's rows, which the lease itself cannot.
"""

import time
from collections.abc import Callable
from typing import Any

import redis

from warmstate.cache_store.errors import LeaseLost
from warmstate.cache_store.names import LEASE, LEASE_TOKENS, IndexNames

LEASE_TTL_MS = 15_000


class EvictionLease:
    """One candidate. `hold` again and again: at most one candidate is told True at a time."""

    def __init__(
        self,
        client: redis.Redis,
        candidate: str,
        ttl_ms: int = LEASE_TTL_MS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._candidate = candidate
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._token: int | None = None
        self._ends_at = 0.0
        self.num_lost = 0

    @property
    def is_held(self) -> bool:
        """As far as our own clock can tell."""
        return self._token is not None and self._clock() < self._ends_at

    @property
    def token(self) -> int:
        """Raises `LeaseLost` when the lease is over by our own clock."""
        if self._token is None or not self.is_held:
            raise LeaseLost("the lease has ended")
        return self._token

    def hold(self) -> bool:
        """Takes the lease when it is free, or renews it; False while another candidate has it."""
        asked_at = self._clock()
        if self._token is not None and not self._renew(self._token):
            self._forget()
        if self._token is None:
            self._token = self._take()
        self._ends_at = asked_at + self._ttl_ms / 1000
        return self._token is not None

    def release(self) -> None:
        """Lets another candidate begin at once."""
        if self._token is not None:
            self._if_ours(self._token, lambda pipeline: pipeline.delete(LEASE))
            self._token = None

    def claim(self, names: IndexNames) -> None:
        """Fences a namespace against all earlier holders. Raises `LeaseLost` when a later one has."""
        token = self.token
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.watch(names.fence)
            fence = _number(pipeline.get(names.fence))
            if fence > token:
                self._lose()
            # A full server refuses every write but removals, and it is then that the holder must go on.
            if fence == token:
                return
            pipeline.multi()
            pipeline.set(names.fence, token)
            self._execute(pipeline)

    def change(self, names: IndexNames, queue: Callable[[Any], None]) -> None:
        """Runs the commands that `queue` puts into a transaction on a namespace that was claimed.

        Raises `LeaseLost`, and changes nothing, when the lease is over or a later holder has claimed the namespace.
        """
        token = self.token
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.watch(names.fence)
            if _number(pipeline.get(names.fence)) != token:
                self._lose()
            pipeline.multi()
            queue(pipeline)
            self._execute(pipeline)

    def change_when_full(self, names: IndexNames, queue: Callable[[Any], None]) -> None:
        """As `change`, for a server that is full and therefore refuses all transactions. `queue` may only remove.

        A later holder that begins between look and removal would see rows go that it has not chosen: a few misses.
        """
        token = self.token
        if _number(self._client.get(names.fence)) != token:
            self._lose()
        pipeline = self._client.pipeline(transaction=False)
        queue(pipeline)
        pipeline.execute()

    def _take(self) -> int | None:
        if self._client.exists(LEASE):
            return None
        token = _number(self._client.incr(LEASE_TOKENS))
        taken = self._client.set(LEASE, self._value(token), nx=True, px=self._ttl_ms)
        return token if taken else None

    def _renew(self, token: int) -> bool:
        return self._if_ours(token, lambda pipeline: pipeline.pexpire(LEASE, self._ttl_ms))

    def _if_ours(self, token: int, queue: Callable[[Any], None]) -> bool:
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.watch(LEASE)
            if pipeline.get(LEASE) != self._value(token):
                return False
            pipeline.multi()
            queue(pipeline)
            try:
                pipeline.execute()
            except redis.WatchError:
                return False
            except redis.exceptions.OutOfMemoryError:
                # A full server refuses transactions. Should the lease have passed on just now, the fence shows it.
                plain = self._client.pipeline(transaction=False)
                queue(plain)
                plain.execute()
            return True

    def _execute(self, pipeline: Any) -> None:
        try:
            pipeline.execute()
        except redis.WatchError:
            self._lose()

    def _lose(self) -> None:
        self._forget()
        raise LeaseLost("a later holder has begun its work")

    def _forget(self) -> None:
        self._token = None
        self.num_lost += 1

    def _value(self, token: int) -> bytes:
        return f"{self._candidate} {token}".encode()


def _number(reply: Any) -> int:
    return int(reply or 0)
