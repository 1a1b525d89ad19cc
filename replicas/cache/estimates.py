"""Owns live estimates of how fast this replica computes and its store answers. Pure: time is passed in, in seconds.

Older samples fade with every newer one and with age, so that an estimate follows a store that has become slow or well.
"""

from dataclasses import dataclass
from threading import Lock

_MIN_SECONDS = 1e-6
_RIDGE = 0.05
"""How much of the squared mean size stands against the variance of sizes before a latency is read out of them."""

_MIN_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class HalfLife:
    """After so many samples, or so many seconds, a sample counts half."""

    samples: float
    seconds: float

    def fade(self, seconds: float) -> float:
        """What is left of the weight of everything older when a sample arrives `seconds` after the last one."""
        return float(0.5 ** (1 / self.samples + max(seconds, 0.0) / self.seconds))


class RateEstimate:
    """Units per second, e.g. prefill tokens: the faded sum of units over the faded sum of seconds. Thread-safe."""

    def __init__(self, half_life: HalfLife) -> None:
        self._half_life = half_life
        self._lock = Lock()
        self._units = 0.0
        self._seconds = 0.0
        self._measured_at_s = 0.0

    def put(self, units: float, seconds: float, now_s: float) -> None:
        with self._lock:
            fade = self._half_life.fade(now_s - self._measured_at_s) if self._seconds else 0.0
            self._units = self._units * fade + units
            self._seconds = self._seconds * fade + max(seconds, _MIN_SECONDS)
            self._measured_at_s = now_s

    def find(self) -> float | None:
        """None before the first sample."""
        with self._lock:
            return self._units / self._seconds if self._seconds else None


@dataclass(frozen=True, slots=True)
class TransferRate:
    """A transfer of b bytes beside k others takes about `latency_s + b * (1 + k) / bytes_per_s`."""

    latency_s: float
    bytes_per_s: float
    measured_at_s: float

    def seconds(self, num_bytes: int, num_in_flight: int) -> float:
        return self.latency_s + num_bytes * (1 + num_in_flight) / self.bytes_per_s


class TransferEstimate:
    """Fits `TransferRate` to what was measured: a faded ridge regression of seconds on bytes. Thread-safe.

    Transfers of one size cannot tell latency from bandwidth: the ridge then gives all of the time to bandwidth, which
    is right for that size and careful beyond it.
    """

    def __init__(self, half_life: HalfLife) -> None:
        self._half_life = half_life
        self._lock = Lock()
        self._weight = 0.0
        self._x = self._y = self._xx = self._xy = 0.0
        self._measured_at_s = 0.0

    def put(self, num_bytes: int, num_in_flight: int, seconds: float, now_s: float) -> None:
        """One transfer of `num_bytes` > 0 that began beside `num_in_flight` others."""
        x, y = float(num_bytes * (1 + num_in_flight)), max(seconds, _MIN_SECONDS)
        with self._lock:
            old = self._weight * self._half_life.fade(now_s - self._measured_at_s)
            self._weight = old + 1.0
            share = 1.0 / self._weight
            self._x += share * (x - self._x)
            self._y += share * (y - self._y)
            self._xx += share * (x * x - self._xx)
            self._xy += share * (x * y - self._xy)
            self._measured_at_s = now_s

    def find(self) -> TransferRate | None:
        """None before the first sample."""
        with self._lock:
            if not self._weight:
                return None
            all_bandwidth = self._y / self._x
            variance, covariance = self._xx - self._x**2, self._xy - self._x * self._y
            ridge = _RIDGE * self._x**2
            slope = (covariance + ridge * all_bandwidth) / (variance + ridge)
            slope = min(max(slope, _MIN_SHARE * all_bandwidth), all_bandwidth)
            return TransferRate(self._y - slope * self._x, 1 / slope, self._measured_at_s)
