"""What `/metrics` says of the replicas: every figure typed, explained and labelled."""

from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cluster.api.http_metrics import HttpMetrics
from warmstate.cluster.api.replica_figures import COUNTED_AT_INGRESS, FIGURES
from warmstate.cluster.api.replica_series import ReplicaStats, figure_key
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint
from warmstate.replicas.config import EngineConfig, ReplicaConfig, StoreConfig
from warmstate.replicas.histogram import Histogram
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


async def test_every_figure_of_a_replica_is_explained(tmp_path: Path) -> None:
    write_demo_checkpoint(tmp_path / "model", dtype=torch.float32)
    with EmbeddedServer() as server:
        config = ReplicaConfig(
            tmp_path / "model",
            torch.float32,
            True,
            1,
            EngineConfig(max_model_len=512, kv_tokens=1024),
            store=StoreConfig(server.address.url, server.password),
        )
        service = ReplicaService(config, "r1")
        await service.start()
        stats = service.stats()
        await service.close()
    unexplained = {
        name for name in stats if figure_key(name) not in FIGURES and not name.startswith(COUNTED_AT_INGRESS)
    }
    assert unexplained == set()
