"""Owns the replicas' figures as Prometheus series: vLLM's names where they exist, ours for the rest. Knows no HTTP."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

ReplicaStats = Mapping[str, Mapping[str, float]]
"""The latest figures of each replica, by its id and then by the names of `ReplicaService.stats`."""

StatsSource = Callable[[], ReplicaStats]

_VLLM_GAUGES = frozenset({"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"})
_VLLM_COUNTERS = frozenset(
    {
        "prefix_cache_queries",
        "prefix_cache_hits",
        "external_prefix_cache_queries",
        "external_prefix_cache_hits",
        "num_preemptions",
    }
)
# The ingress counts these itself; the same series twice would double every sum.
_COUNTED_AT_INGRESS = ("prompt_tokens", "generation_tokens", "request_success")


class ReplicaCollector(Collector):
    """One scrape's worth of figures, labelled with model and replica."""

    def __init__(self, stats: ReplicaStats, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for name in sorted({name for figures in self._stats.values() for name in figures}):
            if name.startswith(_COUNTED_AT_INGRESS):
                continue
            family = _family(name)
            for replica_id, figures in sorted(self._stats.items()):
                if name in figures:
                    family.add_metric([self._model_name, replica_id], figures[name])
            yield family


def _family(name: str) -> GaugeMetricFamily | CounterMetricFamily | UnknownMetricFamily:
    """Figures that vLLM does not have are untyped: the replica alone knows which of them only grow."""
    labels = ["model_name", "replica"]
    if name in _VLLM_GAUGES:
        return GaugeMetricFamily(f"vllm:{name}", "Of one replica.", labels=labels)
    if name in _VLLM_COUNTERS:
        return CounterMetricFamily(f"vllm:{name}", "Of one replica.", labels=labels)
    return UnknownMetricFamily(f"warmstate:{name}", "Of one replica.", labels=labels)
