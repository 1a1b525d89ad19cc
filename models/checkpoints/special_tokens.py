"""Owns which token ids end a turn: the union of what a checkpoint's files say. Knows no text and no chat template."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from warmstate.models.checkpoints.json_fields import JsonFields, read_json
from warmstate.models.errors import CheckpointError


def read_eos_token_ids(path: Path, configs: Iterable[JsonFields], vocab_size: int) -> frozenset[int]:
    """Union of config.json (text and top level), generation_config.json and the tokenizer's end token.

    They differ in real checkpoints: Qwen3.5's config has <|endoftext|>, its tokenizer <|im_end|>.
    """
    ids: set[int] = set()
    for fields in (*configs, *_optional(path / "generation_config.json")):
        ids |= _ids(fields, vocab_size)
    for fields in _optional(path / "tokenizer_config.json"):
        ids |= _tokenizer_eos(path, fields)
    return frozenset(ids)


def _optional(file: Path) -> list[JsonFields]:
    return [JsonFields(file, read_json(file))] if file.exists() else []


def _ids(fields: JsonFields, vocab_size: int) -> set[int]:
    value = fields.values.get("eos_token_id")
    found = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(item) is not int or not 0 <= item < vocab_size for item in found):
        raise fields.error("eos_token_id", f"expected token ids below vocab_size = {vocab_size}", value)
    return set(found)


def _tokenizer_eos(path: Path, fields: JsonFields) -> set[int]:
    token = fields.values.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if content is None or not (path / "tokenizer.json").exists():
        return set()
    if not isinstance(content, str):
        raise fields.error("eos_token", "expected a string or an added token", token)
    known = token_ids(path / "tokenizer.json")
    if content not in known:
        raise CheckpointError(f"{fields.file}: eos_token {content!r} is not a token of tokenizer.json")
    return {known[content]}


def token_ids(file: Path) -> dict[str, int]:
    """Every token of a tokenizer.json with its id: the model's vocabulary and the added tokens."""
    content = read_json(file)
    try:
        vocabulary: Any = content["model"]["vocab"]
        # A Unigram vocabulary is a list of (token, score) pairs; every other model has a mapping.
        ids = {entry[0]: i for i, entry in enumerate(vocabulary)} if isinstance(vocabulary, list) else dict(vocabulary)
        ids.update({added["content"]: added["id"] for added in content.get("added_tokens") or ()})
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file}: not a tokenizer of the `tokenizers` library: {error!r}") from error
    if any(type(token_id) is not int for token_id in ids.values()):
        raise CheckpointError(f"{file}: a token id is not an integer")
    return ids
