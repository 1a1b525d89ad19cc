"""The configuration reference names every key, with its default where that is a plain value."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from warmstate.cluster.config import AppConfig

REFERENCE = Path(__file__).resolve().parents[2] / "cluster" / "configs" / "reference.md"
ROWS = dict(re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|", REFERENCE.read_text(), flags=re.MULTILINE))


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field.default


def test_the_reference_has_exactly_the_keys_of_the_schema() -> None:
    assert set(ROWS) == {key for key, _ in _keys(AppConfig)}


@pytest.mark.parametrize(
    ("key", "default"), [item for item in _keys(AppConfig) if isinstance(item[1], str | int | float)]
)
def test_the_reference_states_the_default(key: str, default: object) -> None:
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    assert re.search(rf"(?<![\w.]){re.escape(shown)}(?![\w.])", ROWS[key]), ROWS[key]


def test_the_example_is_a_valid_configuration() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", REFERENCE.read_text(), flags=re.MULTILINE | re.DOTALL)
    config = AppConfig.model_validate(yaml.safe_load(example))
    assert config.store.kind == "redis"
    assert config.replicas == 2
