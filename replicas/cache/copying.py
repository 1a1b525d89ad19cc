"""Owns where long copies from the device run: at once, or on a thread beside the steps. Knows not what is copied."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

Work = Callable[[], None]
Post = Callable[[Work], None]
"""Hands work to the engine thread, from any thread."""


class Copier(Protocol):
    """Implementations: `CopyNow`, and `CopyThread` for an engine that must not wait."""

    def run(self, work: Work, done: Work, post: Post) -> None:
        """Does `work`, in the order of the calls, and then `done` on the engine thread, through `post` from another."""
        ...


class CopyNow:
    """Copies before `run` returns."""

    def run(self, work: Work, done: Work, post: Post) -> None:
        work()
        done()


class CopyThread:
    """Copies on a thread of its own. A copy that fails is logged, and its `done` finds it not made."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, Work, Post] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="warmstate-copies", daemon=True)
        self._thread.start()

    def run(self, work: Work, done: Work, post: Post) -> None:
        self._queue.put((work, done, post))

    def close(self) -> None:
        """Ends the thread once everything that waits is copied."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            work, done, post = job
            try:
                work()
            except Exception:
                logger.exception("a checkpoint could not be copied from the device; it is not kept")
            post(done)
