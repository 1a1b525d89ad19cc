"""What `/metrics` says of replicas whose store is not there, and of one that hangs or is dead."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from warmstate.cache_store.embedded import EmbeddedServer

pytestmark = pytest.mark.cluster

REPLICA = "ray::ServeReplica:warmstate:replica"


@pytest.fixture(scope="module", params=["no store", pytest.param("wrong password", marks=pytest.mark.long)])
def unshared(request: Any, start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with two replicas that have nowhere to write their rows."""
    log_file = tmp_path_factory.mktemp("unshared") / "log"
    with EmbeddedServer(64 << 20) as store, pytest.MonkeyPatch.context() as environment:
        environment.setenv("WARMSTATE_REDIS_PASSWORD", "wrong")
        options = ["--no-store"] if request.param == "no store" else ["--redis-url", store.address.url]
        running = start_server(log_file, "--replicas", "2", *options)
        try:
            running.wait_until_ready(2)
            yield running
            assert running.stop(signal.SIGINT) == 0, running.log
        finally:
            running.process.kill()


def test_without_a_store_the_replicas_still_tell_their_figures(unshared: Any, eventually: Callable[..., None]) -> None:
    first, second = unshared.ready_ids()
    for _ in range(3):
        assert unshared.complete("hello " * 20, first, max_tokens=2).status_code == 200
    eventually(lambda: unshared.metric("prefix_cache_queries", first) > 0)
    assert unshared.metric("engine_steps", first) > unshared.metric("engine_steps", second) == 0
    assert 0 < unshared.metric("figures_age_s", second) < 2


def test_a_replica_that_hangs_hides_nobody_and_its_figures_grow_old(
    unshared: Any, eventually: Callable[..., None]
) -> None:
    first, second = unshared.ready_ids()
    eventually(lambda: all(unshared.metric("device_kv_budget_bytes", one) > 0 for one in (first, second)))
    hung = unshared.processes(REPLICA)[0]
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        time.sleep(1.5)
        began = time.monotonic()
        text = unshared.http.get("/metrics").text
        took_s = time.monotonic() - began
        ages = sorted(unshared.metric("figures_age_s", replica_id) for replica_id in (first, second))
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    assert took_s < 0.6
    assert text.count("warmstate:device_kv_budget_bytes{") == 2
    assert ages[0] < 1.3 < ages[1]
    eventually(lambda: max(unshared.metric("figures_age_s", replica_id) for replica_id in (first, second)) < 1.3)
