"""Owns the thread on which prompts are accounted for, so that no step waits for it. Knows not what is counted."""

import logging
import queue
import threading
import time

from warmstate.replicas.cache.prefix_analysis import PromptAccount, StartedPrompt

logger = logging.getLogger(__name__)

_MAX_WAITING = 1000
_SETTLE_S = 0.02


class AnalysisThread:
    """Hands prompts on to `account`, in order; beyond a bound they are left out, counted. Should `account` fail, so are
    all that follow."""

    def __init__(self, account: PromptAccount) -> None:
        self._account = account
        self._queue: queue.SimpleQueue[StartedPrompt | None] = queue.SimpleQueue()
        self._num_left_out = 0
        self._thread = threading.Thread(target=self._run, name="warmstate-analysis", daemon=True)
        self._thread.start()

    def put(self, prompt: StartedPrompt) -> None:
        """Never waits."""
        if self._queue.qsize() >= _MAX_WAITING or not self._thread.is_alive():
            self._num_left_out += 1
        else:
            self._queue.put(prompt)

    def stats(self) -> dict[str, float]:
        own = {
            "cache_requests_left_out": float(self._num_left_out),
            "cache_analysis_thread_alive": float(self._thread.is_alive()),
        }
        return {**self._account.stats(), **own}

    def close(self) -> None:
        """Ends the thread once everything that waits is accounted for."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (prompt := self._next()) is not None:
                self._account.put(prompt)
        except Exception:
            logger.exception("the thread that accounts for prompts has ended; serving goes on without its figures")

    def _next(self) -> StartedPrompt | None:
        """The next prompt; one that came to a resting thread waits until the step that began it is likely over: both
        need this process's one interpreter."""
        was_resting = self._queue.empty()
        prompt = self._queue.get()
        if was_resting:
            time.sleep(_SETTLE_S)
        return prompt
