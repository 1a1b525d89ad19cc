"""Owns what processes hold over time: resident memory, file descriptors, and the budgets that replicas keep."""

import statistics
import threading
import time
from dataclasses import dataclass, field

import psutil

from warmstate.tests.soak.soaked_server import SoakedServer, title_of

MIB = 1 << 20


@dataclass
class Page:
    """The samples of one process, oldest first."""

    title: str
    rss_bytes: list[int] = field(default_factory=list)
    num_fds: list[int] = field(default_factory=list)

    def growth(self) -> float:
        """Median resident memory of the last quarter over that of the second."""
        second, last = self._quarters(self.rss_bytes)
        return statistics.median(last) / statistics.median(second)

    def num_new_fds(self) -> int:
        """File descriptors at the end beyond the most that were open in the second quarter."""
        return self.num_fds[-1] - max(self._quarters(self.num_fds)[0])

    def _quarters(self, samples: list[int]) -> tuple[list[int], list[int]]:
        """The second and the last quarter of the samples: the first belongs to starting."""
        quarter = max(len(samples) // 4, 1)
        return samples[quarter : 2 * quarter], samples[-quarter:]

    def __str__(self) -> str:
        points = [self.rss_bytes[i * (len(self.rss_bytes) - 1) // 8] for i in range(9)]
        rss = " ".join(f"{point / MIB:.0f}" for point in points)
        return f"{self.title[:48]:48} rss MiB {rss}; fds {self.num_fds[0]} to {self.num_fds[-1]}"


class Ledger:
    """Samples every process of the server every `period_s` while its context is open."""

    def __init__(self, server: SoakedServer, period_s: float) -> None:
        self.over_budget: list[str] = []
        self._server = server
        self._period_s = period_s
        self._pages: dict[psutil.Process, Page] = {}
        self._num_rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Ledger":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def page(self, process: psutil.Process) -> Page:
        return self._pages[process]

    def lifelong(self) -> list[Page]:
        """The pages of processes that were there all the time."""
        return [page for page in self._pages.values() if len(page.rss_bytes) >= 0.9 * self._num_rounds]

    def _run(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            self._num_rounds += 1
            for process in self._server.processes():
                self._sample(process)
            self._check_budgets()
            self._stop.wait(max(0.0, started + self._period_s - time.monotonic()))

    def _sample(self, process: psutil.Process) -> None:
        try:
            rss_bytes, num_fds = process.memory_info().rss, process.num_fds()
        except psutil.Error:
            return
        page = self._pages.setdefault(process, Page(""))
        # A worker gets its title only once it knows what it is.
        page.title = title_of(process) or page.title
        page.rss_bytes.append(rss_bytes)
        page.num_fds.append(num_fds)

    def _check_budgets(self) -> None:
        figures = self._server.figures()
        for tier in ("host", "device_kv", "device_state"):
            used, budget = figures.get(f"{tier}_bytes", 0.0), figures.get(f"{tier}_budget_bytes", 0.0)
            if used > budget:
                self.over_budget.append(f"{tier} tiers hold {used:.0f} bytes of {budget:.0f}")
