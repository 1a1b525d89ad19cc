"""Prompts are rendered as Hugging Face renders them, and marks stand where other prompts stop being the same."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from warmstate.cluster.errors import InvalidRequest
from warmstate.cluster.text.chat_template import ChatOptions, ChatTemplate, shared_length
from warmstate.cluster.text.tokenizer import Tokenizer
from warmstate.models.demo.demo_tokenizer import build_tokenizer
from warmstate.models.errors import CheckpointError, MissingFile, UnsupportedCheckpoint

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hällo 世界 👩‍👩‍👧"}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I should look.",
    "tool_calls": [{"function": {"name": "look", "arguments": {"at": "it"}}}],
}
RESULT = {"role": "tool", "content": "42"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

# Opens the think block in the prompt and drops the thinking of all turns before the last question.
OPENS_THINK = """
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- if last.user < 0 %}{{ raise_exception('No user query found.') }}{% endif %}
{%- for m in messages if m.role != 'system' %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index > last.user %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}
{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n') }}
{%- endif %}"""


@pytest.fixture
def opening(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(OPENS_THINK, tokenizer)


def _parts(template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """The prompt's text, cut at its marks."""
    rendered = template.render(messages, ChatOptions(**options))
    cuts = [0, *(mark.position for mark in rendered.marks), len(rendered.token_ids)]
    return [tokenizer.decode(rendered.token_ids[a:b], skip_special_tokens=False) for a, b in pairwise(cuts)]


def test_marks_are_the_end_of_the_system_block_and_the_start_of_the_generation_prompt(
    template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    assert _parts(template, tokenizer, [SYSTEM, USER]) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        f"<|im_start|>user\n{USER['content']}<|im_end|>\n",
        "<|im_start|>assistant\n",
    ]


def test_the_system_mark_comes_after_the_tools(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    system, *_ = _parts(template, tokenizer, [SYSTEM, USER], tools=TOOLS)
    assert "<tools>" in system
    assert system.endswith("<|im_end|>\n")


def test_without_a_system_block_only_the_generation_prompt_is_marked(
    template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    assert len(_parts(template, tokenizer, [USER])) == 2


@pytest.mark.parametrize("first", ["\x00", "", " ", "\n\n", "<|im_start|>", "\u0301e", "same"])
def test_the_system_mark_is_shared_with_every_other_question(
    template: ChatTemplate, tokenizer: Tokenizer, first: str
) -> None:
    one = template.render([SYSTEM, {"role": "user", "content": first}], ChatOptions())
    other = template.render([SYSTEM, {"role": "user", "content": "something else"}], ChatOptions())
    assert (
        one.marks[0].position
        == other.marks[0].position
        == len(tokenizer.encode("<|im_start|>system\nBe brief.<|im_end|>\n").token_ids)
    )


@pytest.mark.parametrize("which", ["demo", "opening"])
def test_the_next_turn_begins_with_exactly_the_tokens_before_the_last_mark(
    which: str, template: ChatTemplate, opening: ChatTemplate
) -> None:
    chosen = {"demo": template, "opening": opening}[which]
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    now = chosen.render([SYSTEM, USER], ChatOptions())
    later = chosen.render([SYSTEM, USER, answer, USER], ChatOptions())
    mark = now.marks[-1].position
    assert now.token_ids[:mark].tolist() == later.token_ids[:mark].tolist()


def test_while_tools_are_used_what_survives_the_next_question_is_marked_too(
    opening: ChatTemplate, tokenizer: Tokenizer
) -> None:
    conversation: list[dict[str, Any]] = [SYSTEM, USER, CALL, RESULT]
    now = opening.render(conversation, ChatOptions())
    rewritten = opening.render(
        [*conversation, {"role": "assistant", "content": "It is 42.", "reasoning_content": ""}, USER], ChatOptions()
    )
    same = shared_length("".join(map(chr, now.token_ids)), "".join(map(chr, rewritten.token_ids)))
    assert [mark.kind for mark in now.marks] == ["system", "loop", "turn"]
    system, survives, turn = (mark.position for mark in now.marks)
    assert system < survives <= same < turn


def test_a_hint_marks_the_end_of_its_message(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    chat = [SYSTEM, USER, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More."}]
    parts = _parts(template, tokenizer, chat, hinted=frozenset({1, 3}))
    # The last message ends where the generation prompt begins.
    assert [part.split("\n")[0] for part in parts] == [
        "<|im_start|>system",
        "<|im_start|>user",
        "<|im_start|>assistant",
        "",
        "<|im_start|>assistant",
    ]
    kinds = [mark.kind for mark in template.render(chat, ChatOptions(hinted=frozenset({1, 3}))).marks]
    assert kinds == ["system", "hint", "hint", "turn"]


def test_a_hint_after_the_tools_marks_their_block(template: ChatTemplate) -> None:
    marks = template.render([SYSTEM, USER], ChatOptions(tools=TOOLS, hints_tools=True)).marks
    assert [mark.kind for mark in marks] == ["hint", "system", "turn"]
    assert marks[0].position == marks[1].position


def test_a_hint_that_the_template_cannot_render_is_no_mark(opening: ChatTemplate) -> None:
    assert [mark.kind for mark in opening.render([USER], ChatOptions(hinted=frozenset({0}))).marks] == ["hint", "turn"]


def test_the_thinking_that_a_prompt_opens_is_noticed(opening: ChatTemplate, template: ChatTemplate) -> None:
    assert opening.render([USER], ChatOptions()).starts_in_reasoning
    assert not opening.render([USER], ChatOptions(extra={"enable_thinking": False})).starts_in_reasoning
    assert not template.render([USER], ChatOptions()).starts_in_reasoning
    talk_of_tags = {"role": "user", "content": "what is <think>?"}
    assert not template.render([talk_of_tags], ChatOptions()).starts_in_reasoning


def test_a_final_message_can_be_continued(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    parts = _parts(template, tokenizer, [USER, {"role": "assistant", "content": "It is "}], **options)
    assert parts[-1] == "<|im_start|>assistant\nIt is "


def test_a_refusal_of_the_template_carries_its_words(opening: ChatTemplate) -> None:
    with pytest.raises(InvalidRequest, match=r"No user query found\.") as raised:
        opening.render([SYSTEM], ChatOptions())
    assert raised.value.param == "messages"


def test_a_template_that_trips_over_a_value_refuses_the_request(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content + messages[0].number }}", tokenizer)
    with pytest.raises(InvalidRequest, match="the chat template refused"):
        template.render([{"role": "user", "content": "x", "number": 5}], ChatOptions())


def test_developer_becomes_system_where_the_template_does_not_know_it(
    opening: ChatTemplate, tokenizer: Tokenizer
) -> None:
    system, *_ = _parts(opening, tokenizer, [{**SYSTEM, "role": "developer"}, USER])
    assert system.startswith("<|im_start|>system\n")


def _write(directory: Path, config: dict[str, Any], jinja: str | None = None) -> None:
    build_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (directory / "chat_template.jinja").write_text(jinja)


@pytest.mark.parametrize(
    ("config", "jinja", "expected"),
    [
        ({"chat_template": "config"}, "file", "file"),
        ({"chat_template": "config"}, None, "config"),
        (
            {"chat_template": [{"name": "rag", "template": "rag"}, {"name": "default", "template": "named"}]},
            None,
            "named",
        ),
        ({"chat_template": "{{ eos_token }}", "eos_token": {"content": "<|im_end|>"}}, None, "<|im_end|>"),
    ],
)
def test_the_jinja_file_comes_before_the_tokenizer_config(
    tmp_path: Path, config: dict[str, Any], jinja: str | None, expected: str
) -> None:
    _write(tmp_path, config, jinja)
    tokenizer = Tokenizer.from_directory(tmp_path)
    rendered = ChatTemplate.from_directory(tmp_path, tokenizer).render([USER], ChatOptions())
    assert tokenizer.decode(rendered.token_ids, skip_special_tokens=False) == expected


def test_a_checkpoint_without_a_template_is_named(tmp_path: Path) -> None:
    _write(tmp_path, {})
    with pytest.raises(MissingFile, match=str(tmp_path)):
        ChatTemplate.from_directory(tmp_path, Tokenizer.from_directory(tmp_path))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", "line 2 of the chat template: unexpected '}'"),
        ("{{ 1 }}\n\n{% if messages %}", "line 3 of the chat template: Unexpected end of template"),
        ("{{ 1 }}\n{{ messages | shout }}", "line 2 of the chat template: No filter named 'shout'"),
        ("{% for a in messages %}" * 30 + "{% endfor %}" * 30, "nested too deeply"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "nested too deeply"),
    ],
)
def test_a_template_that_does_not_compile_is_named_with_its_line(tmp_path: Path, source: str, words: str) -> None:
    for file, (config, jinja) in {
        "chat_template.jinja": ({}, source),
        "tokenizer_config.json": ({"chat_template": source}, None),
    }.items():
        directory = tmp_path / file.partition(".")[0]
        directory.mkdir()
        _write(directory, config, jinja)
        with pytest.raises(CheckpointError) as caught:
            ChatTemplate.from_directory(directory, Tokenizer.from_directory(directory))
        assert str(caught.value).startswith(f"{directory / file}: ")
        assert words in str(caught.value)


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ raise_exception('no messages') }}", "{{ 1 / 0 }}"])
def test_a_template_that_only_refuses_a_conversation_compiles(tmp_path: Path, source: str) -> None:
    _write(tmp_path, {}, source)
    ChatTemplate.from_directory(tmp_path, Tokenizer.from_directory(tmp_path))


@pytest.mark.parametrize("template", [7, {"default": "x"}, [{"name": "rag", "template": "x"}]])
def test_a_template_of_another_type_is_named(tmp_path: Path, template: Any) -> None:
    _write(tmp_path, {"chat_template": template})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        ChatTemplate.from_directory(tmp_path, Tokenizer.from_directory(tmp_path))


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    _write(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        ChatTemplate.from_directory(tmp_path, Tokenizer.from_directory(tmp_path))


def test_a_tokenizer_that_is_missing_or_not_byte_level_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": {"type": "Metaspace"}}))
    with pytest.raises(UnsupportedCheckpoint, match="byte-level"):
        Tokenizer.from_directory(tmp_path)


def test_what_was_rendered_for_others_changes_no_mark(opening: ChatTemplate, tokenizer: Tokenizer) -> None:
    conversations = [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "<|im_start|>assistant\n"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    ]
    for thinking in (True, False):
        options = ChatOptions(extra={"enable_thinking": thinking})
        for messages in conversations * 2:
            fresh = ChatTemplate(OPENS_THINK, tokenizer)
            assert opening.render(messages, options).marks == fresh.render(messages, options).marks
