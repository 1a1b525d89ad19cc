"""Chats as people have them: each turn resumes where the last began to be answered, whatever a template rewrites."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from warmstate.cluster.text.tokenizer import Tokenizer
from warmstate.models.demo.demo_chat_template import CHAT_TEMPLATE
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint

WithReplica = Callable[[Path, Callable[[httpx.AsyncClient], Awaitable[None]]], None]

SYSTEM = {"role": "system", "content": "You look things up. " * 6}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
QUESTIONS = ["What is the height of the tower?" * 2, "And its age?", "Is it the oldest one? " * 5, "Thanks."]

# As Qwen3.5: tools before the system text, thinking opened in the prompt, and old thinking dropped.
QWEN35_LIKE = """
{{- '<|im_start|>system\\n' }}
{%- if tools %}{{ '# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '\\n\\n' }}{% endif %}
{{- messages[0].content + '<|im_end|>\\n' }}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- if last.user < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for m in messages[1:] %}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 + 1 > last.user %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

TEMPLATES = {
    "qwen3": (CHAT_TEMPLATE, "<|im_start|>assistant\n"),
    "qwen3.5": (QWEN35_LIKE, "<|im_start|>assistant\n<think>\n"),
}


@pytest.fixture(scope="module", params=TEMPLATES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / str(request.param)
    write_demo_checkpoint(directory, size="tiny", dtype=torch.float32)
    (directory / "chat_template.jinja").write_text(TEMPLATES[directory.name][0], encoding="utf-8")
    return directory


async def _usage(client: httpx.AsyncClient, messages: list[Any], **fields: Any) -> tuple[int, int, dict[str, Any]]:
    """Tokens of the prompt, those of them that were cached, and the answer."""
    body = {"messages": messages, "tools": [TOOL], "temperature": 0, "max_tokens": 6, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    usage, answer = response.json()["usage"], response.json()["choices"][0]["message"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], answer


def test_every_turn_resumes_where_the_last_began_to_be_answered(
    checkpoint: Path, tokenizer: Tokenizer, with_local_replica: WithReplica
) -> None:
    generation_prompt = len(tokenizer.encode(TEMPLATES[checkpoint.name][1]).token_ids)

    async def work(client: httpx.AsyncClient) -> None:
        messages: list[Any] = [SYSTEM]
        previous = None
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            length, cached, answer = await _usage(client, messages)
            if previous is None:
                assert cached == 0
            else:
                assert cached >= (previous - generation_prompt) // 64 * 64 > 0
            previous = length
            messages.append({"role": "assistant", "reasoning_content": "Well.", "content": answer["content"] or ""})

    with_local_replica(checkpoint, work)


def test_a_tool_loop_resumes_its_last_step_and_the_next_question_what_is_left_of_it(
    checkpoint: Path, tokenizer: Tokenizer, with_local_replica: WithReplica
) -> None:
    generation_prompt = len(tokenizer.encode(TEMPLATES[checkpoint.name][1]).token_ids)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    step = {"role": "assistant", "reasoning_content": "I look again. " * 9, "content": "", "tool_calls": [call]}

    async def work(client: httpx.AsyncClient) -> None:
        messages: list[Any] = [SYSTEM, {"role": "user", "content": QUESTIONS[0]}]
        question_end, _, _ = await _usage(client, messages)
        previous = question_end
        for _ in range(2):
            messages += [step, {"role": "tool", "tool_call_id": "c", "content": "Nothing there."}]
            length, cached, _ = await _usage(client, messages)
            assert cached >= (previous - generation_prompt) // 64 * 64
            previous = length
        messages += [{"role": "assistant", "content": "It is not there."}, {"role": "user", "content": "Then where?"}]
        _, cached, _ = await _usage(client, messages)
        assert cached >= (question_end - generation_prompt) // 64 * 64

    with_local_replica(checkpoint, work)


def test_system_and_tools_are_warm_when_they_are_seen_again(
    checkpoint: Path, tokenizer: Tokenizer, with_local_replica: WithReplica
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        first, _, _ = await _usage(client, [SYSTEM, {"role": "user", "content": "One question."}])
        _, cached, _ = await _usage(client, [SYSTEM, {"role": "user", "content": "Another, and a longer one."}])
        rest = len(
            tokenizer.encode("<|im_start|>user\nOne question.<|im_end|>\n" + TEMPLATES[checkpoint.name][1]).token_ids
        )
        assert cached == (first - rest) // 64 * 64 > 0

    with_local_replica(checkpoint, work)
