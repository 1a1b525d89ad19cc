"""What `/metrics` says of the replicas: every figure typed, explained and labelled."""

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import chain_root, prefix_keys
from warmstate.cluster.api.http_metrics import HttpMetrics
from warmstate.cluster.api.replica_figures import COUNTED_AT_INGRESS, FIGURES
from warmstate.cluster.api.replica_series import ReplicaStats, figure_key
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint
from warmstate.replicas.config import CacheConfig, EngineConfig, ReplicaConfig, StoreConfig
from warmstate.replicas.histogram import Histogram
from warmstate.replicas.messages import GenerateRequest, SamplingParams
from warmstate.replicas.service import ReplicaService


def exposed(stats: ReplicaStats) -> str:
    return HttpMetrics("demo").text(stats).decode()


def samples(stats: ReplicaStats) -> dict[str, dict[str, float]]:
    """By name, the values of the replica r1 by their own label."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(exposed(stats)):
        for sample in family.samples:
            if sample.labels.get("replica") == "r1":
                ours = {k: v for k, v in sample.labels.items() if k not in ("model_name", "replica")}
                found.setdefault(sample.name, {})[next(iter(ours.values()), "")] = sample.value
    return found


def test_reasons_and_sources_are_labels_of_one_family() -> None:
    stats = {"r1": {"store_fetch_misses_absent": 1.0, "store_fetch_misses_breaker_open": 2.0, "restores_host": 3.0}}
    found = samples(stats)
    assert found["warmstate:store_fetch_misses_total"] == {"absent": 1, "breaker_open": 2}
    assert found["warmstate:restores_total"] == {"host": 3}


def test_a_histogram_can_be_read_as_one() -> None:
    histogram = Histogram((0.5, 1.0))
    for value in (0.1, 0.5, 0.7, 9.0):
        histogram.observe(value)
    found = samples({"r1": histogram.as_dict("store_fetch_seconds")})
    assert found["warmstate:store_fetch_seconds_bucket"] == {"0.5": 2, "1": 3, "+Inf": 4}
    assert found["warmstate:store_fetch_seconds_count"] == {"": 4}
    assert found["warmstate:store_fetch_seconds_sum"] == {"": pytest.approx(10.3)}


def test_a_figure_of_a_newer_replica_is_shown_untyped() -> None:
    text = exposed({"r1": {"brand_new_thing": 7.0}, "r2": {}})
    assert "# TYPE warmstate:brand_new_thing unknown" in text.replace("untyped", "unknown")
    assert 'warmstate:brand_new_thing{model_name="demo",replica="r1"} 7.0' in text


def test_replicas_of_two_versions_do_not_hide_each_other() -> None:
    found = samples({"r1": {"store_hits": 1.0}, "r2": {"store_hits": 2.0, "host_hits": 1.0}})
    assert found == {"warmstate:store_hits_total": {"": 1}}


def test_every_family_has_one_type_and_a_help_text() -> None:
    figures = {name.replace("*", "x"): 1.0 for name, figure in FIGURES.items() if figure.kind != "histogram"}
    for name, figure in FIGURES.items():
        if figure.kind == "histogram":
            figures |= Histogram((1.0,)).as_dict(name)
    text = exposed({"r1": figures, "r2": figures})
    families = list(text_string_to_metric_families(text))
    announced = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(announced) == len(set(announced))
    assert {family.type for family in families} <= {"counter", "gauge", "histogram"}
    assert all(len(family.documentation) > 10 for family in families)
    assert len([family for family in families if family.name.startswith(("vllm:", "warmstate:"))]) > len(FIGURES)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as running:
        yield running


@pytest.fixture(scope="module")
def config(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> ReplicaConfig:
    path = tmp_path_factory.mktemp("model") / "demo"
    write_demo_checkpoint(path, dtype=torch.float32)
    store = StoreConfig(server.address.url, server.password)
    engine = EngineConfig(max_model_len=1024, kv_tokens=4096)
    return ReplicaConfig(path, torch.float32, True, 1, engine, CacheConfig(32 << 20, fetch_policy="always"), store)


async def ask(service: ReplicaService, seed: int, salt: bytes = b"") -> None:
    ids = np.random.default_rng(seed).integers(0, 200, 600).astype(np.int32)
    root = chain_root(salt)
    keys = b"".join(prefix_keys(ids.astype(np.uint32), root))
    request = GenerateRequest(f"{seed}-{time.monotonic()}", ids, SamplingParams(max_tokens=3), root, keys)
    async for _ in service.generate(request):
        pass


async def figures_after(service: ReplicaService, name: str, at_least: float) -> dict[str, float]:
    """The figures once one of them is so large."""
    deadline = time.monotonic() + 20
    while service.stats().get(name, 0) < at_least:
        assert time.monotonic() < deadline, f"{name} is {service.stats().get(name)}"
        await asyncio.sleep(0.02)
    return service.stats()


async def test_traffic_moves_the_figures_and_each_of_them_is_explained(config: ReplicaConfig) -> None:
    first, second = ReplicaService(config, "r1"), ReplicaService(config, "r2")
    await first.start()
    await second.start()
    before = second.stats()
    await ask(first, 1)
    await figures_after(first, "store_published", 1)
    await figures_after(second, "store_events_read", before["store_events_read"] + 2)
    await ask(second, 1)
    await ask(second, 1)
    await ask(second, 2, b"alice")
    await ask(second, 2, b"bob")
    await figures_after(second, "store_published", 2)
    after = await figures_after(second, "cache_requests_miss", 2)
    await first.close()
    await second.close()
    unexplained = {n for n in after if figure_key(n) not in FIGURES and not n.startswith(COUNTED_AT_INGRESS)}
    assert unexplained == set()
    moved = moved_between(before, after)
    assert moved >= {
        "cache_blocked_requests_*", "cache_blocked_tokens_*", "cache_load_seconds", "cache_requests_*",
        "cache_restore_seconds", "checkpoints_kept_*", "device_kv_resident_bytes", "engine_step_rows",
        "engine_step_seconds", "engine_step_tokens", "engine_steps", "external_prefix_cache_hits",
        "external_prefix_cache_queries", "host_bytes", "host_checkpoints", "host_checkpoints_whole", "host_hits",
        "host_objects", "kv_blocks_resident", "prefill_tokens_per_s", "prefix_cache_hits", "prefix_cache_queries",
        "restored_tokens_*", "restores_*", "store_bytes_per_s", "store_events_read", "store_events_sent",
        "store_fetch_decisions_*", "store_fetch_hits", "store_fetch_seconds", "store_fetched_bytes",
        "store_get_seconds", "store_hits", "store_hits_told", "store_publish_seconds", "store_published",
        "store_put_seconds", "store_read_bytes", "store_stored", "store_written_bytes",
    }  # fmt: skip
    assert after["cache_blocked_tokens_salt"] == 576
    assert after["external_prefix_cache_queries"] == 3 * 600 + 600 - 576
    assert after["external_prefix_cache_hits"] == after["restored_tokens_store"] == 576


async def test_a_store_that_dies_moves_the_figures_of_failure(config: ReplicaConfig, server: EmbeddedServer) -> None:
    first = ReplicaService(config, "r3")
    await first.start()
    for seed in range(10, 14):
        await ask(first, seed)
    await figures_after(first, "store_published", 4)
    await first.close()
    second = ReplicaService(config, "r4")
    await second.start()
    before = second.stats()
    await asyncio.to_thread(server.stop)
    for seed in range(10, 14):
        await ask(second, seed)
    await figures_after(second, "store_publish_dropped_unavailable", 1)
    await figures_after(second, "store_follower_failures", 1)
    after = await figures_after(second, "cache_requests_miss", 4)
    await second.close()
    assert moved_between(before, after) >= {
        "store_breaker_open", "store_breaker_opened", "store_dropped_*", "store_fetch_misses_*", "store_misses_*",
        "store_publish_dropped_*", "store_follower_failures",
    }  # fmt: skip
    assert after["cache_blocked_tokens_store"] == 4 * 576


def moved_between(before: dict[str, float], after: dict[str, float]) -> set[str]:
    return {figure_key(name) for name, value in after.items() if value != before.get(name, 0.0)}
