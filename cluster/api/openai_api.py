"""Owns the shape of request bodies: OpenAI's fields and those that vLLM adds, with their limits. Knows no model.

Unknown fields are kept apart (`model_extra`) and ignored; null means the default everywhere.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, field_validator

MAX_STOP_STRINGS = 16
MAX_CHOICES = 16
MAX_LOGPROBS = 20

# They would replace what the renderer itself passes to the template.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "tokenize",
        "tools",
    }
)


NonEmpty = Annotated[str, Field(min_length=1)]
StopList = Annotated[list[NonEmpty], Field(max_length=MAX_STOP_STRINGS)]


class Body(BaseModel):
    """Strict types: "0.5" is not a number and true is not 1. Infinity and NaN are no numbers at all."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=(), frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingFields(Body):
    """The settings that a model's generation_config.json can have too."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)


class GenerationBody(SamplingFields, ABC):
    """What chat and plain completions share."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: NonEmpty | StopList | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: NonEmpty | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Any = None
    metadata: Any = None

    @field_validator("stream_options")
    @classmethod
    def only_when_streaming(cls, value: StreamOptions | None, info: Any) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only allowed together with stream: true")
        return value

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many alternatives to report beside each token; None reports no logprobs."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, whether one or several were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, if the request says so."""
        return self.max_tokens


class ContentPart(Body):
    """One part of a message's content; text is the only kind served."""

    type: str
    text: str

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

    @field_validator("content")
    @classmethod
    def only_assistants_may_be_silent(cls, value: Any, info: Any) -> Any:
        if value is None and info.data.get("role") not in (None, "assistant"):
            raise ValueError("a string or a list of text parts is needed")
        return value

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
    return value


Tool = Annotated[dict[str, Any], AfterValidator(_function_tool)]


class ChatCompletionBody(GenerationBody):
    """POST /v1/chat/completions.

    `tools` reach the template whatever `tool_choice` says ("none" must not cost a warm prefix); the model's calls come
    back as the text it wrote, not yet parsed into `tool_calls`.
    """

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Any = None
    response_format: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @field_validator("top_logprobs")
    @classmethod
    def only_with_logprobs(cls, value: int | None, info: Any) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("only allowed together with logprobs: true")
        return value

    @field_validator("tool_choice")
    @classmethod
    def only_free_choice(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError(f"{json.dumps(value):.80} is not supported; use 'auto' or 'none'")
        return value

    @field_validator("response_format")
    @classmethod
    def only_text(cls, value: Any) -> Any:
        if value is not None and (not isinstance(value, dict) or value.get("type") != "text"):
            raise ValueError("not supported yet; the only format is {'type': 'text'}")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def nothing_reserved(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if reserved := sorted(_RESERVED_TEMPLATE_KWARGS & set(value or ())):
            raise ValueError(f"{', '.join(reserved)} cannot be set here")
        return value

    @field_validator("continue_final_message")
    @classmethod
    def one_way_to_end(cls, value: bool | None, info: Any) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("cannot be combined with add_generation_prompt: true")
        return value

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """OpenAI's four spellings as a list of prompts: a string, strings, token ids, lists of token ids."""
    many = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if any(not _is_prompt(prompt) for prompt in many):
        raise ValueError("expected a string, strings, token ids, or lists of token ids, none of them empty")
    return many


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(token) is int for token in value)
    return isinstance(value, str) and value != ""


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, AfterValidator(_prompts)]
    echo: bool | None = None
    logprobs: StrictInt | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None

    @field_validator("suffix")
    @classmethod
    def no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("inserting before a suffix is not supported")
        return value

    @field_validator("logprobs")
    @classmethod
    def only_of_the_output(cls, value: int | None, info: Any) -> int | None:
        if value is not None and info.data.get("echo"):
            raise ValueError("log probabilities of an echoed prompt are not supported yet")
        return value

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


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
