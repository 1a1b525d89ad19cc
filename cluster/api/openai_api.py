"""Owns the shape of request bodies: OpenAI's fields and those that vLLM adds, with their limits. Knows no model.

Unknown fields are kept apart (`model_extra`) and ignored; null means the default everywhere.
"""

import json
from abc import ABC, abstractmethod
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, StrictInt, field_validator

from warmstate.cluster.api.cache_hints import MAX_HINTS, check_few_hints, is_hinted
from warmstate.cluster.api.chat_messages import Body, ChatMessage, Tool

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
    # Logits are divided by it: within these bounds they stay finite and keep their order.
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)


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
    @abstractmethod
    def prompt_field(self) -> str:
        """The field that holds the prompt."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, whether one or several were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, if the request says so."""
        return self.max_tokens


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

    @field_validator("messages", "tools")
    @classmethod
    def few_hints(cls, value: Any, info: Any) -> Any:
        messages = value if info.field_name == "messages" else info.data.get("messages", ())
        tools = (value or ()) if info.field_name == "tools" else ()
        check_few_hints(sum(m.num_hints for m in messages) + sum(map(is_hinted, tools)))
        return value

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
    def prompt_field(self) -> str:
        return "messages"

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
    cache_hints: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=MAX_HINTS)] | None = None

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

    @property
    def prompt_field(self) -> str:
        return "prompt"
