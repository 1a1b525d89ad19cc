import logging
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from warmstate.cache_store.redis_client import TlsFiles
from warmstate.cache_store.store_keeper import KeeperLimits
from warmstate.cluster.config import GIB, parse_config
from warmstate.cluster.launch.launch_errors import ConfigError, MemoryShort
from warmstate.cluster.launch.launch_plan import LaunchPlan, check_memory, plan_launch
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint
from warmstate.replicas.cache.shared_store import store_endpoints
from warmstate.replicas.free_memory import Memory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "demo"
    write_demo_checkpoint(directory, dtype=torch.float32)
    return directory


def plan(checkpoint: Path, **sections: dict[str, object]) -> LaunchPlan:
    model = {"path": str(checkpoint), **sections.pop("model", {})}
    return plan_launch(parse_config({"model": model, **sections}))


def test_float32_weights_are_served_as_they_are_and_deterministically(checkpoint: Path) -> None:
    found = plan(checkpoint)
    assert found.replica.dtype is torch.float32
    assert found.replica.deterministic
    assert found.card.served_name == "demo"


def test_bfloat16_is_deterministic_only_when_asked(checkpoint: Path) -> None:
    assert not plan(checkpoint, model={"dtype": "bfloat16"}).replica.deterministic
    assert plan(checkpoint, model={"dtype": "bfloat16", "deterministic": True}).replica.deterministic


def test_float32_cannot_be_asked_not_to_be_deterministic(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.deterministic"):
        plan(checkpoint, model={"deterministic": False})


def test_the_kv_holds_the_longest_sequence(checkpoint: Path) -> None:
    assert plan(checkpoint).replica.engine.max_model_len == 65_536
    longer = plan(checkpoint, engine={"max_model_len": 200_001}).replica.engine
    assert (longer.max_model_len, longer.kv_tokens) == (200_001, 200_064)
    with pytest.raises(ConfigError, match=r"engine\.kv_tokens 640 cannot hold"):
        plan(checkpoint, engine={"max_model_len": 1000, "kv_tokens": 640})


def test_yarn_in_the_config_allows_sequences_of_the_stretched_length(tmp_path: Path) -> None:
    card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144}
    rope: Any = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_parameters": card}
    write_demo_checkpoint(tmp_path / "demo", **rope)
    assert plan(tmp_path / "demo", engine={"max_model_len": 1_010_000}).replica.engine.max_model_len == 1_010_000
    with pytest.raises(ConfigError, match="more than the model's 1048576 positions"):
        plan(tmp_path / "demo", engine={"max_model_len": 1_050_000})


def test_fewer_kv_tokens_shorten_the_context(checkpoint: Path) -> None:
    assert plan(checkpoint, engine={"kv_tokens": 640}).replica.engine.max_model_len == 640


def test_float16_weights_become_bfloat16_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_demo_checkpoint(tmp_path / "demo", dtype=torch.float16)
    assert plan(tmp_path / "demo", model={"dtype": "auto"}).replica.dtype is torch.bfloat16
    assert "the weights are float16" in caplog.text
    caplog.clear()
    assert plan(tmp_path / "demo", model={"dtype": "float32"}).replica.dtype is torch.float32
    assert not caplog.records


def test_kv_may_be_sized_in_bytes(checkpoint: Path) -> None:
    found = plan(checkpoint, engine={"kv_tokens": 6400})
    shapes = found.summary.config.state_shapes(torch.float32)
    num_bytes = 6400 * shapes.num_attention_layers * shapes.num_kv_heads * 2 * shapes.head_dim * 4
    assert plan(checkpoint, engine={"kv_bytes": num_bytes}).replica.engine == found.replica.engine
    assert plan(checkpoint, engine={"kv_bytes": num_bytes - 1}).replica.engine.kv_tokens == 6336
    with pytest.raises(ConfigError, match=r"engine\.kv_bytes 1000 cannot hold one block of 64 tokens"):
        plan(checkpoint, engine={"kv_bytes": 1000})
    with pytest.raises(ConfigError, match="kv_tokens and kv_bytes say the same"):
        plan(checkpoint, engine={"kv_tokens": 6400, "kv_bytes": num_bytes})


def test_memory_grows_with_replicas_and_kv(checkpoint: Path) -> None:
    small = plan(checkpoint, engine={"kv_tokens": 6400})
    large = plan(checkpoint, engine={"kv_tokens": 64_000})
    shapes = small.summary.config.state_shapes(torch.float32)
    per_token = shapes.num_attention_layers * shapes.num_kv_heads * 2 * shapes.head_dim * 4
    assert large.needed_bytes - small.needed_bytes == 2 * per_token * 57_600


def test_short_memory_is_refused_with_numbers(checkpoint: Path) -> None:
    tokens = psutil.virtual_memory().total // 1000
    found = plan(checkpoint, engine={"kv_tokens": tokens * 64})
    with pytest.raises(MemoryShort, match=r"2 replicas need about .* GiB, .* GiB is free"):
        check_memory(found)
    check_memory(plan(checkpoint))


def test_budgets_that_grow_past_the_memory_are_a_warning(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = plan(checkpoint)
    assert found.budget_bytes > found.needed_bytes >= found.least_bytes
    with caplog.at_level(logging.INFO):
        check_memory(found, Memory(found.budget_bytes, found.budget_bytes))
        check_memory(found, Memory(found.budget_bytes, found.budget_bytes - 1))
        check_memory(found, Memory(found.needed_bytes, found.least_bytes))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert "lower cache.host_bytes" in caplog.messages[1]
    with pytest.raises(MemoryShort):
        check_memory(found, Memory(found.needed_bytes, found.least_bytes - 1))
    with pytest.raises(MemoryShort):
        check_memory(found, Memory(found.needed_bytes - 1, found.needed_bytes - 1))


def test_budgets_count_what_is_used(checkpoint: Path) -> None:
    whole = plan(checkpoint).budget_bytes
    assert whole - plan(checkpoint, cache={"host_bytes": "1GiB"}).budget_bytes == 2 * GIB
    assert whole - plan(checkpoint, store={"maxmemory": "1GiB"}).budget_bytes == GIB
    assert whole - plan(checkpoint, store={"kind": "none"}).budget_bytes == 2 * GIB + 2 * GIB


def test_a_redis_store_takes_its_password_from_the_environment(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMSTATE_REDIS_PASSWORD", "secret")
    store = plan(checkpoint, store={"kind": "redis", "url": "redis://h:1"}).replica.store
    assert (store.url, store.password) == ("redis://h:1", "secret")


def test_a_redis_store_is_reached_as_configured(checkpoint: Path) -> None:
    keys = {"username": "replica", "tls_ca_file": __file__, "tls_cert_file": __file__, "tls_key_file": __file__}
    store: dict[str, object] = {"kind": "redis", "url": "rediss://h:1", "min_bandwidth": "3MB", **keys}
    endpoints = store_endpoints(plan(checkpoint, store=store).replica.store)
    assert endpoints is not None
    assert endpoints.index is endpoints.payload
    address = endpoints.payload
    assert address.username == "replica"
    assert address.tls == TlsFiles(__file__, __file__, __file__)
    assert address.timeout_s(6_000_000) == 4.0
    assert plan(checkpoint).replica.store.url is None


def test_an_index_of_its_own_is_reached_as_configured(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMSTATE_REDIS_PASSWORD", "secret")
    store = {"kind": "redis", "url": "redis://h:1", "index_url": "redis://i:2", "budget_bytes": "3GB", "low_water": 0.5}
    endpoints = store_endpoints(plan(checkpoint, store=store).replica.store)
    assert endpoints is not None
    assert (endpoints.payload.url, endpoints.index.url) == ("redis://h:1", "redis://i:2")
    assert endpoints.index.password == "secret"
    monkeypatch.setenv("WARMSTATE_REDIS_INDEX_PASSWORD", "other")
    config = plan(checkpoint, store=store).replica.store
    assert (config.password, config.index_password) == ("secret", "other")
    assert config.keeper == KeeperLimits(3_000_000_000, 0.85, 0.5, 86_400.0)
