"""Owns the decision to leave a failing server alone for a while. Knows nothing of what the server does."""

import time
from collections.abc import Callable
from threading import Lock


class Breaker:
    """Opens after `num_failures` failures in a row; while open, lets one trial pass every `retry_s` seconds.

    A trial that succeeds closes it. A trial whose end is never reported merely waits for the next one.
    """

    def __init__(
        self, num_failures: int = 3, retry_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_failures = num_failures
        self._retry_s = retry_s
        self._clock = clock
        self._lock = Lock()
        self._failures_in_row = 0
        self._next_trial_at = 0.0
        self._times_opened = 0

    @property
    def is_open(self) -> bool:
        return self._failures_in_row >= self._num_failures

    @property
    def times_opened(self) -> int:
        return self._times_opened

    def allows(self) -> bool:
        """Whether to try now; in the open state a True is the one trial of this period."""
        with self._lock:
            if not self.is_open:
                return True
            now = self._clock()
            if now < self._next_trial_at:
                return False
            self._next_trial_at = now + self._retry_s
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures_in_row = 0

    def failed(self) -> None:
        with self._lock:
            was_open = self.is_open
            self._failures_in_row += 1
            if self.is_open and not was_open:
                self._times_opened += 1
                self._next_trial_at = self._clock() + self._retry_s
