"""Owns the connections that move payload: opened in the background, kept, and opened anew when they end.

So no request pays for connecting, but one that comes while none is open: it waits as long as the attempt that is under
way, at most the connect timeout. Knows nothing of what is moved.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import redis
from redis.connection import Connection

from warmstate.cache_store.redis_client import StoreAddress, open_client

_LOOK_PERIOD_S = 0.5
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 2.0


class KeptConnections:
    """Lends up to `size` connections to as many threads."""

    def __init__(self, address: StoreAddress, size: int) -> None:
        self._client = open_client(address, size)
        self._size = size
        self._wait_s = address.connect_timeout_s
        self._changed = threading.Condition()
        self._ready: list[Connection] = []
        self._num_lent = 0
        self._num_failed = 0
        self._num_opened = 0
        self._problem: Exception = redis.ConnectionError("no connection was ever open")
        self._is_asked = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="warmstate-store-connect", daemon=True)
        self._thread.start()

    @property
    def num_opened(self) -> int:
        """Connections opened since the start."""
        return self._num_opened

    @property
    def num_ready(self) -> int:
        """Connections that nobody uses now."""
        return len(self._ready)

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """An open connection; whoever leaves a reply under way disconnects it. Raises the client's errors."""
        connection = self._take()
        try:
            yield connection
        finally:
            with self._changed:
                self._num_lent -= 1
                self._ready.append(connection)
                if self._closed:
                    self._disconnect_all()
                self._changed.notify_all()

    def close(self) -> None:
        """Closes what is not lent now; what is lent is closed when it comes back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._client.close()

    def _take(self) -> Connection:
        with self._changed:
            num_failed, deadline = self._num_failed, time.monotonic() + self._wait_s
            while not (self._closed or self._drop_ended()):
                self._is_asked = True
                self._changed.notify_all()
                if self._num_failed > num_failed:
                    raise self._problem
                if not self._changed.wait(deadline - time.monotonic()):
                    raise redis.TimeoutError(f"no connection came up within {self._wait_s} s")
            if self._closed:
                raise redis.ConnectionError("the connections were closed")
            self._num_lent += 1
            return self._ready.pop()

    def _drop_ended(self) -> bool:
        """Lets go of what the server has closed; whether a connection is left."""
        ended = [connection for connection in self._ready if not _is_idle(connection)]
        for connection in ended:
            connection.disconnect()
            self._ready.remove(connection)
        return bool(self._ready)

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while self._needs_one():
            connection = self._client.connection_pool.connection_class(**self._client.connection_pool.connection_kwargs)
            try:
                connection.connect()
            except (redis.RedisError, OSError) as error:
                self._failed(error, retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
                continue
            retry_s = _FIRST_RETRY_S
            with self._changed:
                self._num_opened += 1
                self._ready.append(connection)
                self._changed.notify_all()
        with self._changed:
            self._disconnect_all()

    def _disconnect_all(self) -> None:
        for connection in self._ready:
            connection.disconnect()
        self._ready.clear()

    def _needs_one(self) -> bool:
        """Waits until a connection is lacking; False when closed."""
        with self._changed:
            while not self._closed:
                self._drop_ended()
                if len(self._ready) + self._num_lent < self._size:
                    return True
                self._changed.wait(_LOOK_PERIOD_S)
            return False

    def _failed(self, error: Exception, retry_s: float) -> None:
        """Tells those who wait, and tries again after a while, or as soon as somebody asks."""
        with self._changed:
            self._problem, self._is_asked = error, False
            self._num_failed += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._is_asked, retry_s)


def _is_idle(connection: Connection) -> bool:
    """Whether it is open, and nothing has come that nobody asked for."""
    if connection._sock is None:
        return False
    with suppress(redis.RedisError, OSError):
        return not connection.can_read(0)
    return False
