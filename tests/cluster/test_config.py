import re
from pathlib import Path

import pytest

from warmstate.cluster.config import AppConfig, merge, parse_config, read_config_file
from warmstate.cluster.launch.launch_errors import ConfigError


def config(**sections: object) -> AppConfig:
    return parse_config({"model": {"path": "somewhere"}, **sections})


def test_a_path_alone_is_a_whole_configuration() -> None:
    assert config().replicas == 2
    assert config().store.kind == "embedded"
    assert config().http.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"engine": {"max_sequence": 3}}, "engine.max_sequence"),
        ({"engine": {"max_batch_tokens": 0}}, "engine.max_batch_tokens"),
        ({"enginee": {}}, "enginee"),
        ({"http": {"port": 70000}}, "http.port"),
        ({"http": {"port": "eight"}}, "http.port"),
        ({"cache": {"host_bytes": "two"}}, "cache.host_bytes"),
        ({"replicas": 0}, "replicas"),
        ({"engine": {"max_queue": 0}}, "engine.max_queue"),
        ({"http": {"api_keys": {"alice": ""}}}, "http.api_keys.alice"),
        ({"model": {"path": "x", "served_name": ""}}, "model.served_name"),
        ({"model": {"path": "x", "dtype": "int4"}}, "model.dtype"),
        ({"store": {"kind": "redis"}}, "store"),
        ({"store": {"kind": "redis", "url": "localhost:6379"}}, "store.url"),
        ({"store": {"kind": "redis", "url": "redis://localhost:many"}}, "store.url"),
        ({"store": {"maxmemory": -5}}, "store.maxmemory"),
        ({"http": {"max_body_bytes": 0}}, "http.max_body_bytes"),
        ({"cache": {"host_bytes": -1}}, "cache.host_bytes"),
        ({"store": {"kind": "none", "url": "redis://x"}}, "store"),
        ({"store": {"index_url": "redis://x"}}, "store"),
        ({"store": {"kind": "redis", "url": "redis://x", "index_url": "x"}}, "store.index_url"),
        ({"store": {"low_water": 0.85}}, "store"),
        ({"store": {"high_water": 1.5}}, "store.high_water"),
        ({"store": {"min_bandwidth": 0}}, "store.min_bandwidth"),
        ({"store": {"kind": "redis", "url": "redis://x", "tls_ca_file": __file__}}, "store"),
        ({"store": {"kind": "redis", "url": "rediss://x", "tls_cert_file": __file__}}, "store"),
        ({"store": {"kind": "redis", "url": "rediss://x", "tls_ca_file": "/nowhere/ca.pem"}}, "store"),
    ],
)
def test_a_bad_key_is_named(sections: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert f"  {key}: " in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("sections", "hint"),
    [
        ({"engine": {"max_sequnces": 3}}, "did you mean max_sequences?"),
        ({"engin": {}}, "did you mean engine?"),
        ({"router": {"zzz": 1}}, "known are max_attempts, index_entries"),
    ],
)
def test_an_unknown_key_is_told_what_it_may_have_meant(sections: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown key; {hint}")):
        config(**sections)


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model: Field required"):
        parse_config({})


def test_sizes_are_read_with_units() -> None:
    assert config(cache={"host_bytes": "2GiB"}).cache.host_bytes == 2 << 30
    assert config(store={"maxmemory": "64MiB"}).store.maxmemory == 64 << 20


def test_overrides_win_section_by_section_and_none_overrides_nothing() -> None:
    base = {"engine": {"max_sequences": 3, "max_queue": 5}, "replicas": 4}
    merged = merge(base, {"engine": {"max_queue": 9, "max_sequences": None}, "replicas": None, "http": {"port": 1}})
    assert merged == {"engine": {"max_sequences": 3, "max_queue": 9}, "replicas": 4, "http": {"port": 1}}


def test_the_password_comes_from_the_environment_unless_the_config_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMSTATE_REDIS_PASSWORD", "from-environment")
    assert config().redis_password() == "from-environment"
    assert config(store={"password": "from-config"}).redis_password() == "from-config"


def test_secrets_are_not_in_the_text_of_the_configuration() -> None:
    shown = repr(config(store={"password": "hunter2"}, http={"api_keys": {"me": "hunter3"}}))
    assert "hunter" not in shown


@pytest.mark.parametrize(("text", "message"), [("[1, 2]", "expected a mapping"), ("a: [", "not valid YAML")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config_file(file)


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80")])
def test_the_url_of_an_ipv6_host_has_brackets(host: str, url: str) -> None:
    assert config(http={"host": host, "port": 80}).http.url == url


def test_what_is_no_section_stays_for_the_validation_to_name() -> None:
    assert merge({"engine": 5, "http": None}, {"engine": {"max_queue": None}, "http": {"port": 1}}) == {
        "engine": 5,
        "http": {"port": 1},
    }


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        read_config_file(tmp_path / "absent.yaml")
