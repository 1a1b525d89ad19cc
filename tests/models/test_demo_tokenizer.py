"""The demo tokenizer round-trips any text, and its chat template renders turns as Qwen's do."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from warmstate.models.demo.demo_tokenizer import (
    CONTROL_TOKENS,
    END_OF_TURN,
    TAG_TOKENS,
    build_tokenizer,
    num_tokens,
    token_id,
    write_tokenizer,
)

Message = dict[str, Any]

BYTES = build_tokenizer()
USER: Message = {"role": "user", "content": "hi"}
THINKING: Message = {"role": "assistant", "content": "yo", "reasoning_content": "hmm"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, 4096)
    return PreTrainedTokenizerFast.from_pretrained(path)


def render(tokenizer: Any, *messages: Message, **options: Any) -> str:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    assert isinstance(text, str)
    return text


@given(st.text())
def test_any_text_is_its_bytes_and_comes_back(text: str) -> None:
    if any(token in text for token in (*CONTROL_TOKENS, *TAG_TOKENS)):
        return
    ids = BYTES.encode(text).ids
    assert bytes(ids) == text.encode()
    assert BYTES.decode(ids) == text


def test_special_tokens_are_one_id_each_after_the_bytes(tokenizer: Any) -> None:
    for token in (*CONTROL_TOKENS, *TAG_TOKENS):
        assert tokenizer(token)["input_ids"] == [token_id(token)]
    assert len(tokenizer) == num_tokens() == 265
    assert tokenizer.eos_token == END_OF_TURN


def test_control_tokens_are_hidden_when_decoding_and_tags_are_not(tokenizer: Any) -> None:
    ids = tokenizer("<think>a</think><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_a_turn_is_chatml(tokenizer: Any) -> None:
    expected = "<|im_start|>system\nbe\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(tokenizer, {"role": "system", "content": "be\n"}, USER, add_generation_prompt=True) == expected


def test_thinking_is_open_unless_switched_off(tokenizer: Any) -> None:
    text = render(tokenizer, USER, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    assert render(tokenizer, USER, add_generation_prompt=True, enable_thinking=True) == text
    off = render(tokenizer, USER, add_generation_prompt=True, enable_thinking=False)
    assert off == text + "<think>\n\n</think>\n\n"


def test_thinking_of_earlier_turns_is_dropped(tokenizer: Any) -> None:
    text = render(tokenizer, USER, THINKING, USER)
    assert "hmm" not in text
    assert "<|im_start|>assistant\nyo<|im_end|>" in text


def test_thinking_after_the_last_question_is_kept(tokenizer: Any) -> None:
    call = {"role": "assistant", "content": "", "reasoning_content": "hmm"}
    text = render(tokenizer, USER, call, {"role": "tool", "content": "5"})
    assert "<|im_start|>assistant\n<think>\nhmm\n</think>\n\n" in text


def test_thinking_inside_the_content_is_the_same_as_reasoning_content(tokenizer: Any) -> None:
    inline = {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nyo"}
    assert render(tokenizer, USER, inline) == render(tokenizer, USER, THINKING)
    assert render(tokenizer, USER, inline, USER) == render(tokenizer, USER, THINKING, USER)


def test_tools_share_the_system_block(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = render(tokenizer, {"role": "system", "content": "be"}, USER, tools=tools)
    block, _, rest = text.partition("<|im_end|>\n")
    assert block.startswith("<|im_start|>system\nbe\n\n# Tools\n")
    assert '"name": "add"' in block
    assert rest == "<|im_start|>user\nhi<|im_end|>\n"
    assert render(tokenizer, USER, tools=tools).startswith("<|im_start|>system\n# Tools\n")


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_calls_and_their_results_are_tagged(tokenizer: Any, arguments: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    results = [{"role": "tool", "content": "5"}, {"role": "tool", "content": "6"}]
    text = render(tokenizer, USER, {"role": "assistant", "content": None, "tool_calls": [call, call]}, *results)
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{one}\n{one}<|im_end|>\n" in text
    responses = "\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
    assert text.endswith("<|im_start|>user" + responses)


def test_parts_of_text_are_joined(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert render(tokenizer, {"role": "user", "content": parts}) == render(tokenizer, USER)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"role": "wizard", "content": "x"}], "unexpected role: wizard"),
        ([USER, {"role": "system", "content": "x"}], "system message must be the first"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text only, found content of type image_url"),
        ([{"role": "user", "content": 3}], "content must be a string"),
    ],
)
def test_what_cannot_be_rendered_raises(tokenizer: Any, messages: list[Message], complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        render(tokenizer, *messages)


def test_a_prompt_is_a_prefix_of_the_next_turn_without_its_generation_prompt(tokenizer: Any) -> None:
    """What the checkpoint before the generation prompt relies on."""
    prompt = render(tokenizer, USER)
    assert render(tokenizer, USER, THINKING, USER).startswith(prompt)
