"""Owns what the HTTP API must know of the served model. Knows no weights and no replica."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from warmstate.cluster.api.openai_api import SamplingFields
from warmstate.models.checkpoints.json_fields import read_json
from warmstate.models.config import read_config
from warmstate.models.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What requests are checked against. `default_sampling` holds what generation_config.json sets, by our names."""

    served_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    created: int
    default_sampling: Mapping[str, float] = field(default_factory=dict)


def read_model_card(path: Path, served_name: str, max_model_len: int) -> ModelCard:
    """Reads config.json and generation_config.json of a checkpoint; raises `CheckpointError` for what is not valid."""
    config = read_config(path)
    return ModelCard(
        served_name=served_name,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=frozenset(config.eos_token_ids),
        created=int(time.time()),
        default_sampling=_default_sampling(path / "generation_config.json"),
    )


def _default_sampling(file: Path) -> dict[str, float]:
    """The sampling fields that are set, within the limits of requests. No file means no defaults."""
    if not file.is_file():
        return {}
    try:
        fields = SamplingFields.model_validate(read_json(file))
    except ValidationError as error:
        problem = error.errors()[0]
        raise CheckpointError(
            f"{file}: {problem['loc'][0]}: {problem['msg']}, found {problem['input']!r:.60}"
        ) from error
    found: dict[str, float] = fields.model_dump(exclude_none=True)
    return found
