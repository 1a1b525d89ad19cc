"""A private Ray with Serve on this machine: its own directory and ports, never another's. Knows nothing of the app."""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from warmstate.cluster.launch.front_proxy import COMMAND, find_command
from warmstate.cluster.launch.interrupts import ignore_signals
from warmstate.cluster.launch.launch_errors import StartFailed
from warmstate.cluster.launch.ports import find_free_ports
from warmstate.cluster.launch.process_tree import end_all_on_signals

_FAST_ENVIRONMENT = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}

_QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}

_DRAIN_ENVIRONMENT = {
    # On one machine nothing in front of HAProxy has to be told to go away first.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
    # When the ingress changes a new HAProxy takes over, and this is how long the streams of the old one may last.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
}

_LOOPBACK_ENVIRONMENT = {
    # Ray's own default where a firewall would ask about every port (macOS, Windows): all of its servers listen on
    # 127.0.0.1 only. Read when ray is imported.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

_PATIENCE_ENVIRONMENT = {
    # Serve kills a proxy that is not up after 5 s, and then its own start fails: a busy machine needs longer.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "55",
}

_OBJECT_STORE_BYTES = 128 << 20
"""Requests and tokens travel by gRPC; the object store is hardly used."""


class LocalRay:
    """Context manager: Ray and Serve run inside it, with their files in `directory`. Leaving it stops them in order and
    removes the files. Until `raise_on_signals` is called inside, a signal ends all of it out of order."""

    def __init__(self, directory: Path, host: str, port: int, dashboard: bool = False) -> None:
        self._directory = directory
        self._host = host
        self._port = port
        self._dashboard = dashboard

    @property
    def log_directory(self) -> Path:
        return self._directory / "session_latest" / "logs"

    def __enter__(self) -> Self:
        end_all_on_signals(self._directory)
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        if find_command() is None:
            raise StartFailed(f"the command {COMMAND} is missing; install warmstate again (make setup)")
        os.environ.update(self._environment())
        import ray
        from ray import serve

        ray.init(
            address="local",
            include_dashboard=self._dashboard,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(self._directory),
        )
        end_all_on_signals(self._directory)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options={"host": self._host, "port": self._port})

    def _environment(self) -> dict[str, str]:
        proxy = self._directory / "proxy"
        stats, metrics, fallback = find_free_ports(3)
        return {
            **serve_environment(),
            **_QUIET_ENVIRONMENT,
            **_DRAIN_ENVIRONMENT,
            **_LOOPBACK_ENVIRONMENT,
            **_PATIENCE_ENVIRONMENT,
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(proxy / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy / "server-state"),
        }

    def _stop(self) -> None:
        ignore_signals()
        import ray
        from ray import serve

        if ray.is_initialized():
            # Not serve.shutdown(): its controller kills itself while it answers, which Ray reports as an error.
            for application in list(serve.status().applications):
                serve.delete(application)
            ray.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)


def serve_environment() -> dict[str, str]:
    """What the HTTP path rests on, its speed and its first answers; Serve reads it once, when it is imported."""
    return {**_FAST_ENVIRONMENT, "RAY_SERVE_HAPROXY_BINARY_PATH": find_command() or COMMAND}


def serve_environment_is_set(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether Serve runs with the settings that `warmstate serve` gives it; `serve run` leaves that to its user."""
    return all(environment.get(name) == value for name, value in serve_environment().items())
