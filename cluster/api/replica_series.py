"""Owns the replicas' figures as Prometheus series: vLLM's names where they exist, ours for the rest. Knows no HTTP."""

from collections.abc import Awaitable, Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from warmstate.cluster.api.replica_figures import COUNTED_AT_INGRESS, FIGURES, Figure

ReplicaStats = Mapping[str, Mapping[str, float]]
"""The latest figures of each replica, by its id and then by the names of `ReplicaService.stats`."""

StatsSource = Callable[[], Awaitable[ReplicaStats]]

_LABELS = ("model_name", "replica")
_HISTOGRAM_ENDS = ("_bucket_", "_sum", "_count")


class ReplicaCollector(Collector):
    """One scrape's worth of figures, labelled with model and replica."""

    def __init__(self, stats: ReplicaStats, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        told = {name for figures in self._stats.values() for name in figures if not name.startswith(COUNTED_AT_INGRESS)}
        for key in sorted({figure_key(name) for name in told}):
            names = sorted(name for name in told if figure_key(name) == key)
            figure = FIGURES.get(key)
            if figure is None:
                yield self._unknown(key)
            elif figure.kind == "histogram":
                yield self._histogram(key, figure)
            else:
                yield self._numbers(key, figure, names)

    def _numbers(self, key: str, figure: Figure, names: list[str]) -> Metric:
        name = _metric_name(key, figure)
        labels = [*_LABELS, figure.label] if figure.label else list(_LABELS)
        family: CounterMetricFamily | GaugeMetricFamily
        if figure.kind == "counter":
            family = CounterMetricFamily(name, figure.text, labels=labels)
        else:
            family = GaugeMetricFamily(name, figure.text, labels=labels)
        for replica_id, figures in sorted(self._stats.items()):
            for full_name in names:
                if full_name in figures:
                    end = [full_name.removeprefix(key.removesuffix("*"))] if figure.label else []
                    family.add_metric([self._model_name, replica_id, *end], figures[full_name])
        return family

    def _histogram(self, key: str, figure: Figure) -> HistogramMetricFamily:
        family = HistogramMetricFamily(_metric_name(key, figure), figure.text, labels=_LABELS)
        prefix = f"{key}_bucket_"
        for replica_id, figures in sorted(self._stats.items()):
            if f"{key}_count" not in figures:
                continue
            bounds = sorted(
                (float(name.removeprefix(prefix)), n) for name, n in figures.items() if name.startswith(prefix)
            )
            buckets = [(f"{bound:g}", count) for bound, count in bounds] + [("+Inf", figures[f"{key}_count"])]
            family.add_metric([self._model_name, replica_id], buckets, figures.get(f"{key}_sum", 0.0))
        return family

    def _unknown(self, name: str) -> UnknownMetricFamily:
        """A figure of a replica that runs another version than this ingress."""
        family = UnknownMetricFamily(f"warmstate:{name}", "Not known to this version.", labels=_LABELS)
        for replica_id, figures in sorted(self._stats.items()):
            if name in figures:
                family.add_metric([self._model_name, replica_id], figures[name])
        return family


def figure_key(name: str) -> str:
    """The key of `FIGURES` that tells of this figure; the name itself where none does."""
    if name in FIGURES:
        return name
    for end in _HISTOGRAM_ENDS:
        base = name.partition(end)[0] if end.endswith("_") else name.removesuffix(end)
        if base != name and base in FIGURES and FIGURES[base].kind == "histogram":
            return base
    parts = name.split("_")
    for length in range(len(parts) - 1, 0, -1):
        key = "_".join(parts[:length]) + "_*"
        if key in FIGURES:
            return key
    return name


def _metric_name(key: str, figure: Figure) -> str:
    return f"{'vllm' if figure.is_vllm else 'warmstate'}:{key.removesuffix('_*')}"
