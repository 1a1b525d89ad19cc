"""Owns how a request says where its prompt is worth a checkpoint: Anthropic's `cache_control`. Knows no rendering."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

MAX_HINTS = 4
"""As many as Anthropic allows."""


class CacheControl(BaseModel):
    """`{"type": "ephemeral"}`: a checkpoint after what carries it. How long it is kept is the server's business."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    type: Literal["ephemeral"]


def check_hint(tool: Mapping[str, Any]) -> None:
    """Raises ValueError where a tool's `cache_control` is none."""
    try:
        if is_hinted(tool):
            CacheControl.model_validate(tool["cache_control"])
    except ValidationError as error:
        raise ValueError("cache_control: expected {'type': 'ephemeral'}") from error


def is_hinted(tool: Mapping[str, Any]) -> bool:
    """Whether a tool asks for a checkpoint after the tools; null asks for nothing."""
    return tool.get("cache_control") is not None


def check_few_hints(num_hints: int) -> None:
    """Raises ValueError for more hints than one request may give."""
    if num_hints > MAX_HINTS:
        raise ValueError(f"cache_control: {num_hints} are given, and a request may have {MAX_HINTS}")


def without_hints(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as the model must see them."""
    return None if tools is None else [{k: v for k, v in tool.items() if k != "cache_control"} for tool in tools]
