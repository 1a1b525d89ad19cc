"""Owns what the HTTP API counts and times, under vLLM's names, and the text of `/metrics`. Knows no request field."""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from warmstate.cluster.api.replica_series import ReplicaCollector, ReplicaStats

# When each series began is of use to nobody, and would be a third of them.
disable_created_metrics()

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class HttpMetrics:
    """The series of one ingress process, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", _TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "Between tokens of one choice.", _ITL_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the request to its last token.", _E2E_BUCKETS
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens taken in.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.cached_tokens = self._counter("vllm:prompt_tokens_cached", "Prompt tokens restored, not computed.")
        self._success = Counter(
            "vllm:request_success",
            "Finished choices by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._errors = Counter(
            "warmstate:http_errors", "Error answers by status.", ["model_name", "status"], registry=self.registry
        )

    def timer(self) -> "RequestTimer":
        """Starts the clock of one request."""
        return RequestTimer(self)

    def count_success(self, finished_reason: str) -> None:
        self._success.labels(self._model_name, finished_reason).inc()

    def count_error(self, status: int) -> None:
        self._errors.labels(self._model_name, str(status)).inc()

    def text(self, stats: ReplicaStats) -> bytes:
        """The Prometheus exposition of this process's series and of the replicas' figures."""
        replicas = CollectorRegistry()
        replicas.register(ReplicaCollector(stats, self._model_name))
        return generate_latest(self.registry) + generate_latest(replicas)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model_name)


class RequestTimer:
    """Times one request; a choice's tokens that arrive together count as one interval."""

    def __init__(self, metrics: HttpMetrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: dict[int, float] = {}

    def tokens_arrived(self, choice: int, count: int) -> None:
        """Records that `count` tokens of a choice came in now."""
        now = time.perf_counter()
        last = self._last.get(choice)
        if last is None:
            self._metrics.time_to_first_token.observe(now - self._start)
        else:
            self._metrics.inter_token_latency.observe(now - last)
        self._last[choice] = now
        self._metrics.generation_tokens.inc(count)

    def choice_finished(self, reason: str) -> None:
        self._metrics.count_success(reason)
        self._metrics.e2e_latency.observe(time.perf_counter() - self._start)

    def prompt_finished(self, num_tokens: int, num_cached: int) -> None:
        """Records a prompt once its cached share is known."""
        self._metrics.prompt_tokens.inc(num_tokens)
        self._metrics.cached_tokens.inc(num_cached)
