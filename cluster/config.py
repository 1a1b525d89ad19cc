"""The one schema of the application, for `--config FILE` and for the `args` of a Serve config. Knows no Ray."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from redis.connection import parse_url

from warmstate.cluster.launch.launch_errors import ConfigError
from warmstate.cluster.launch.logs import LogLevel

REDIS_PASSWORD_VARIABLE = "WARMSTATE_REDIS_PASSWORD"
REDIS_INDEX_PASSWORD_VARIABLE = "WARMSTATE_REDIS_INDEX_PASSWORD"
CACHE_SECRET_VARIABLE = "WARMSTATE_CACHE_SECRET"

GIB = 1 << 30

T = TypeVar("T")

Filled = Annotated[T, Field(min_length=1)]
"""A text that is not empty: an empty key would let everyone in."""


class Section(BaseModel):
    """Unknown keys are errors: a misspelt key must not be a silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(Section):
    """What is served. `dtype` auto is the checkpoint's own; float32 implies `deterministic`."""

    path: str
    served_name: Filled[str] | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    deterministic: bool | None = None


class EngineSection(Section):
    """Sizes of one replica's engine; None is chosen from model and machine. KV is sized in tokens or in bytes."""

    max_model_len: int | None = Field(default=None, ge=64)
    max_batch_tokens: int = Field(default=2048, ge=64)
    max_sequences: int = Field(default=16, ge=1, le=4096)
    max_queue: int = Field(default=256, ge=1)
    kv_tokens: int | None = Field(default=None, ge=64)
    kv_bytes: ByteSize | None = None
    num_threads: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_size_of_kv(self) -> Self:
        if self.kv_tokens is not None and self.kv_bytes is not None:
            raise ValueError("kv_tokens and kv_bytes say the same; give one of them")
        return self


class CacheSection(Section):
    """The hybrid prefix cache of one replica."""

    host_bytes: ByteSize = ByteSize(2 * GIB)
    enabled: bool = True
    fetch_policy: Literal["auto", "always", "never"] = "auto"
    max_in_flight_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = ByteSize(512 << 20)
    parking_fraction: float = Field(default=0.25, ge=0, lt=1)
    max_checkpoints_per_path: int = Field(default=8, ge=1)
    session_ttl_s: int = Field(default=1800, ge=1)


class StoreSection(Section):
    """The store shared by the replicas: one we start, one that is there, or none."""

    kind: Literal["embedded", "redis", "none"] = "embedded"
    url: str | None = None
    username: str | None = None
    password: SecretStr | None = None
    index_url: str | None = None
    index_password: SecretStr | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    connect_timeout_s: float = Field(default=0.25, gt=0)
    operation_timeout_s: float = Field(default=2.0, gt=0)
    min_bandwidth: Annotated[ByteSize, Field(gt=0)] = ByteSize(50_000_000)
    ttl_s: int = Field(default=86_400, ge=1)
    max_object_bytes: ByteSize = ByteSize(256 << 20)
    maxmemory: Annotated[ByteSize, Field(ge=1 << 20)] = ByteSize(2 * GIB)
    budget_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    high_water: float = Field(default=0.85, gt=0, le=1)
    low_water: float = Field(default=0.8, gt=0, le=1)

    @field_validator("url", "index_url")
    @classmethod
    def url_can_be_read(cls, value: str | None) -> str | None:
        if value is not None:
            parse_url(value)
        return value

    @model_validator(mode="after")
    def url_fits_kind(self) -> Self:
        if self.kind == "redis" and self.url is None:
            raise ValueError("kind redis needs store.url, e.g. redis://127.0.0.1:6379")
        if self.kind != "redis" and self.url is not None:
            raise ValueError(f"store.url is only read when store.kind is redis, not {self.kind}")
        if self.kind != "redis" and self.index_url is not None:
            raise ValueError(f"store.index_url is only read when store.kind is redis, not {self.kind}")
        return self

    @model_validator(mode="after")
    def water_falls(self) -> Self:
        if self.low_water >= self.high_water:
            raise ValueError(f"store.low_water {self.low_water} must be below store.high_water {self.high_water}")
        return self

    @model_validator(mode="after")
    def tls_files_are_read(self) -> Self:
        """A certificate that nobody would look at must not look like security."""
        named = [name for name in ("tls_ca_file", "tls_cert_file", "tls_key_file") if getattr(self, name) is not None]
        if named and not (self.url or "").startswith("rediss://"):
            raise ValueError(f"store.{named[0]} is only read when store.url starts with rediss://")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("store.tls_cert_file and store.tls_key_file go together: name both or neither")
        for name in named:
            if not Path(getattr(self, name)).is_file():
                raise ValueError(f"store.{name}: there is no file {getattr(self, name)}")
        return self


class RouterSection(Section):
    """How requests find replicas. One request is sent at most `max_attempts` times before the client sees an error."""

    max_attempts: int = Field(default=4, ge=1, le=32)
    index_entries: int = Field(default=200_000, ge=1)


class HttpSection(Section):
    """The HTTP API. `api_keys` maps a tenant's name to its key; empty means that nobody is asked for one."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    max_body_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(32 << 20)
    api_keys: dict[Filled[str], Filled[SecretStr]] = Field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where clients on this machine find the API."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class AppConfig(Section):
    """The whole application."""

    model: ModelSection
    engine: EngineSection = EngineSection()
    cache: CacheSection = CacheSection()
    store: StoreSection = StoreSection()
    router: RouterSection = RouterSection()
    http: HttpSection = HttpSection()
    replicas: int = Field(default=2, ge=1)
    log_level: LogLevel = "info"

    def redis_password(self) -> str | None:
        """The store's password: from the config, else from the environment."""
        if self.store.password is not None:
            return self.store.password.get_secret_value()
        return os.environ.get(REDIS_PASSWORD_VARIABLE)

    def redis_index_password(self) -> str | None:
        """The index server's password: from the config, else from the environment, else the store's."""
        if self.store.index_password is not None:
            return self.store.index_password.get_secret_value()
        return os.environ.get(REDIS_INDEX_PASSWORD_VARIABLE) or self.redis_password()

    def cache_secret(self) -> bytes:
        """The key under which tenants' salts are made; drawn anew per start unless the environment names one."""
        secret = os.environ.get(CACHE_SECRET_VARIABLE)
        return secret.encode() if secret else os.urandom(32)


def parse_config(values: Mapping[str, Any]) -> AppConfig:
    """Validates `values`; raises `ConfigError` that names every bad key."""
    try:
        return AppConfig.model_validate(dict(values))
    except ValidationError as error:
        problems = [f"  {_key(problem['loc'])}: {_sentence(problem)}" for problem in error.errors()]
        raise ConfigError("\n".join(["the configuration is not valid:", *problems])) from error


def _sentence(problem: ErrorDetails) -> str:
    if problem["type"] != "extra_forbidden":
        return problem["msg"].removeprefix("Value error, ")
    *above, name = map(str, problem["loc"])
    section = AppConfig.model_fields[above[0]].annotation if above else AppConfig
    assert section is not None, "every section has a type"
    known = list(section.model_fields)
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known are {', '.join(known)}"


def _key(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "(top level)"


def read_config_file(path: Path) -> dict[str, Any]:
    """The values of a YAML file, unvalidated; raises `ConfigError` when it is not a YAML mapping."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected a mapping of sections, found {type(values).__name__}")
    return values


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `overrides` laid over it, section by section; None overrides nothing."""
    merged = dict(base)
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            below = {} if merged.get(key) is None else merged[key]
            # What is no section stays as it is, for the validation to name it.
            merged[key] = merge(below, value) if isinstance(below, Mapping) else below
        elif value is not None:
            merged[key] = value
    return merged
