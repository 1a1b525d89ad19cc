"""Reads typed fields out of a JSON file of a checkpoint; every complaint names the file, the field and the value."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmstate.models.errors import CheckpointError, MissingFile

MAX_INTEGER = 2**31 - 1


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; raises `MissingFile`, or `CheckpointError` for anything that is not a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise MissingFile(f"{path}: no such file; a checkpoint directory must have it") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {_shown(value)}")
    return value


@dataclass(frozen=True, slots=True)
class JsonFields:
    """One JSON object; `where` is its path inside the file, "" for the top level. A null counts as absent."""

    file: Path
    values: Mapping[str, Any]
    where: str = ""

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def child(self, name: str) -> "JsonFields | None":
        """The object under `name`, or None when it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "expected an object", value)
        return JsonFields(self.file, value, self._path(name) + ".")

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        value = self._value(name, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.error(name, f"expected an integer from {minimum} to {maximum}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.error(name, "expected a positive number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.error(name, "expected true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if type(value) is not str:
            raise self.error(name, "expected a string", value)
        return value

    def items(self, name: str, kind: type) -> list[Any] | None:
        """A list whose members are all of `kind`, or None when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self.error(name, f"expected a list of {kind.__name__}", value)
        return value

    def error(self, name: str, expected: str, value: object) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self._path(name)}: {expected}, found {_shown(value)}")

    def _value(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.file}: {self._path(name)} is missing")
        return default

    def _path(self, name: str) -> str:
        return self.where + name


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
