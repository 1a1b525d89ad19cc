"""Owns what the HTTP API must know of the served model. Knows no weights and no replica."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from warmstate.models.config import read_config

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


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
    """Reads config.json and generation_config.json of a checkpoint that has passed the preflight."""
    config = read_config(path)
    return ModelCard(
        served_name=served_name,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=frozenset(config.eos_token_ids),
        created=int(time.time()),
        default_sampling=_default_sampling(path / "generation_config.json"),
    )


def _default_sampling(path: Path) -> dict[str, float]:
    """The sampling fields that are set; null and absent mean neutral. No file means no defaults."""
    if not path.is_file():
        return {}
    values = json.loads(path.read_text(encoding="utf-8"))
    return {name: values[name] for name in _SAMPLING_FIELDS if values.get(name) is not None}
