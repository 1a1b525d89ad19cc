"""Owns where a checkpoint keeps its chat template, and that it is one. Renders no conversation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from warmstate.models.checkpoints.json_fields import read_json
from warmstate.models.errors import CheckpointError, MissingFile

# A template calls `raise_exception`, or trips over a value that it did not expect.
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


def read_template(directory: Path) -> tuple[str, dict[str, str]]:
    """The template and the special tokens it sees: chat_template.jinja, else tokenizer_config.json's.

    Raises `MissingFile` without either, and `CheckpointError`, naming file and line, where it does not compile.
    """
    config_file, file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config = read_json(config_file) if config_file.is_file() else {}
    if file.is_file():
        source: str | None = _read_text(file)
    else:
        file, source = config_file, _default_of(config_file, config.get("chat_template"))
    if source is None:
        raise MissingFile(f"{directory}: no chat template, neither chat_template.jinja nor in tokenizer_config.json")
    _check_compiles(file, source)
    return source, _special_tokens(config)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _default_of(file: Path, template: Any) -> str | None:
    """tokenizer_config.json holds one template, or a list of named ones of which "default" is used."""
    if template is None or isinstance(template, str):
        return template
    if not isinstance(template, list):
        raise CheckpointError(f"{file}: chat_template: expected a string or a list of named ones, found {template!r}")
    named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    default = named.get("default")
    if not isinstance(default, str):
        raise CheckpointError(f"{file}: chat_template has no default among {sorted(map(str, named))}")
    return default


def _check_compiles(file: Path, source: str) -> None:
    try:
        render_jinja_template(conversations=[[]], chat_template=source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{file}: line {error.lineno} of the chat template: {error.message}") from error
    except (SyntaxError, RecursionError) as error:
        raise CheckpointError(f"{file}: the chat template is nested too deeply: {error}") from error
    except REFUSALS:
        # It compiles: what fails is rendering a conversation without messages, as most templates do.
        return


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as templates see them; a token is a string or an object with `content`."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token") and not name.startswith("add_")}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}
