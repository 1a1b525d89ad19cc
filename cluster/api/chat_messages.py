"""Owns the shape of messages and tools: OpenAI's, with Anthropic's `cache_control`. Knows no model and no sampling."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from warmstate.cluster.api.cache_hints import CacheControl, check_hint


class Body(BaseModel):
    """Strict types: "0.5" is not a number and true is not 1. Infinity and NaN are no numbers at all."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=(), frozen=True)


class ContentPart(Body):
    """One part of a message's content; text is the only kind served."""

    type: str
    text: str
    cache_control: CacheControl | None = None

    @field_validator("type")
    @classmethod
    def only_text(cls, value: str) -> str:
        if value != "text":
            raise ValueError(f"content of type {value!r} is not supported; this server reads text only")
        return value


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    id: str | None = None
    type: str | None = None
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Templates iterate over `arguments`, so OpenAI's JSON string becomes a mapping."""
        call = {"name": self.function.name, "arguments": lenient_arguments(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": call}


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = Field(default=None, validate_default=True)
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    cache_control: CacheControl | None = None

    @field_validator("content")
    @classmethod
    def only_assistants_may_be_silent(cls, value: Any, info: Any) -> Any:
        if value is None and info.data.get("role") not in (None, "assistant"):
            raise ValueError("a string or a list of text parts is needed")
        return value

    @property
    def num_hints(self) -> int:
        """How often the message asks for a checkpoint after it."""
        parts = self.content if isinstance(self.content, list) else ()
        return sum(holder.cache_control is not None for holder in (self, *parts))

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: text joined, absent fields absent, reasoning under both its names."""
        parts = self.content if isinstance(self.content, list) else None
        message: dict[str, Any] = {
            "role": self.role,
            "content": "".join(part.text for part in parts) if parts is not None else self.content or "",
        }
        thoughts = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if thoughts is not None:
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in optional.items() if value is not None}


def _function_tool(value: dict[str, Any]) -> dict[str, Any]:
    """A tool stays the client's own mapping, for templates print it whole and in its order."""
    function = value.get("function")
    if value.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("expected {'type': 'function', 'function': {'name': ..., ...}}")
    check_hint(value)
    return value


Tool = Annotated[dict[str, Any], AfterValidator(_function_tool)]


def lenient_arguments(arguments: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A replayed call's arguments as a mapping. Models do write broken JSON, and a conversation that holds some must
    go on: what is not a JSON object is kept as it stands under the name "arguments"."""
    if isinstance(arguments, Mapping):
        return arguments
    if not arguments or not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}
