"""Owns a count of observations by size, in the form of Prometheus. Knows no exporter."""

import bisect
from collections.abc import Sequence

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TOKENS = (64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


class Histogram:
    """Written by one thread; a reader in another may see an observation a moment late."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def as_dict(self, name: str) -> dict[str, float]:
        """`name_bucket_BOUND`, each counting all observations up to its bound, `name_sum` and `name_count`."""
        figures: dict[str, float] = {}
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            figures[f"{name}_bucket_{bound:g}"] = float(total)
        return {**figures, f"{name}_sum": self._sum, f"{name}_count": float(total + self._counts[-1])}
