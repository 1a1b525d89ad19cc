"""The command as a person meets it: what it prints and its exit code. Nothing here gets as far as starting Ray."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from warmstate.cluster import demo_command
from warmstate.cluster.main import main
from warmstate.models.demo.demo_checkpoint import FAMILIES, SIZES, write_demo_checkpoint

Command = Callable[..., tuple[int, str]]

SERVE = ("serve", "--supervised", "--port", "59999")
"""In this process; a port that nothing gets as far as using."""


@pytest.fixture
def warmstate(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command; gives its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        try:
            code = main(arguments)
        except SystemExit as left:
            code = int(left.code or 0)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "demo"
    write_demo_checkpoint(directory)
    return directory


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_the_installed_command_prints_the_version(argument: str) -> None:
    command = Path(sys.executable).with_name("warmstate")
    result = subprocess.run([command, argument], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "0.1.0\n"


def test_no_command_asks_for_one(warmstate: Command) -> None:
    code, printed = warmstate()
    assert code == 2
    assert "COMMAND" in printed


def test_a_demo_model_can_be_written_and_is_not_written_over(tmp_path: Path, warmstate: Command) -> None:
    directory = str(tmp_path / "demo")
    assert warmstate("demo-model", directory, "--family", "qwen3_5_moe_text", "--seed", "3")[0] == 0
    assert (tmp_path / "demo" / "config.json").exists()
    code, printed = warmstate("demo-model", directory)
    assert code == 2
    assert "demo: not empty" in printed


def test_a_demo_model_where_none_can_be_is_one_clear_error(tmp_path: Path, warmstate: Command) -> None:
    (tmp_path / "file").write_text("")
    code, printed = warmstate("demo-model", str(tmp_path / "file"))
    assert code == 2
    assert "file: Not a directory" in printed


def test_the_demo_command_offers_every_family_and_size() -> None:
    assert set(demo_command.FAMILIES) == set(FAMILIES)
    assert set(demo_command.SIZES) == set(SIZES)


def test_an_unknown_family_lists_the_families(tmp_path: Path, warmstate: Command) -> None:
    code, printed = warmstate("demo-model", str(tmp_path / "demo"), "--family", "llama")
    assert code == 2
    assert "llama" in printed
    assert "qwen3_next" in printed


def test_serving_nothing_asks_for_a_model(warmstate: Command) -> None:
    code, printed = warmstate(*SERVE)
    assert code == 2
    assert "name a model" in printed


def test_a_path_that_is_not_there_is_named(warmstate: Command) -> None:
    code, printed = warmstate(*SERVE, "/no/such/model")
    assert code == 2
    assert "/no/such/model: no such directory" in printed
    assert "Traceback" not in printed


def test_a_truncated_shard_is_named_before_anything_starts(tmp_path: Path, warmstate: Command) -> None:
    write_demo_checkpoint(tmp_path / "demo")
    shard = next((tmp_path / "demo").glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)
    code, printed = warmstate(*SERVE, str(tmp_path / "demo"))
    assert code == 1
    assert shard.name in printed
    assert "starting Ray" not in printed


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", None, "tokenizer.json: no such file"),
        ("tokenizer.json", '{"model": {"vocab": {"<|im_end|>": 0}}}', "only byte-level tokenizers"),
        (
            "tokenizer.json",
            '{"model": {"vocab": {"<|im_end|>": 0}}, "decoder": {"type": "ByteLevel"}}',
            "tokenizer.json: the tokenizers library cannot read it",
        ),
        ("chat_template.jinja", None, "no chat template"),
        ("chat_template.jinja", "{{ 1 }}\n{% if %}", "chat_template.jinja: line 2 of the chat template: "),
        ("generation_config.json", '{"top_p": 7}', "generation_config.json: top_p: Input should be less than"),
        ("generation_config.json", '{"temperature": "hot"}', "generation_config.json: temperature: "),
    ],
)
def test_what_text_needs_is_checked_before_anything_starts(
    tmp_path: Path, warmstate: Command, file: str, content: str | None, words: str
) -> None:
    write_demo_checkpoint(tmp_path / "demo")
    (tmp_path / "demo" / file).unlink()
    if content is not None:
        (tmp_path / "demo" / file).write_text(content)
    code, printed = warmstate(*SERVE, str(tmp_path / "demo"))
    assert code == 1
    assert words in printed
    assert "starting Ray" not in printed


@pytest.mark.parametrize(("host", "words"), [("203.0.113.1", "no address of this machine"), ("..", "not an address")])
def test_a_host_that_is_none_is_told(checkpoint: Path, warmstate: Command, host: str, words: str) -> None:
    code, printed = warmstate(*SERVE, str(checkpoint), "--host", host)
    assert code == 2
    assert words in printed


def test_a_store_that_is_named_and_not_wanted_is_a_contradiction(checkpoint: Path, warmstate: Command) -> None:
    code, printed = warmstate(*SERVE, str(checkpoint), "--no-store", "--redis-url", "redis://127.0.0.1:1")
    assert code == 2
    assert "--no-store and --redis-url contradict each other" in printed


def test_a_taken_port_names_who_has_it(checkpoint: Path, warmstate: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, printed = warmstate("serve", "--supervised", str(checkpoint), "--port", str(port))
    assert code == 1
    assert f"port {port} of 127.0.0.1 is in use by pid {os.getpid()}" in printed
    assert "--port" in printed


def test_too_little_memory_is_told_with_numbers(checkpoint: Path, warmstate: Command) -> None:
    code, printed = warmstate("serve", "--supervised", str(checkpoint), "--replicas", "5000")
    assert code == 1
    assert "5000 replicas need about" in printed
    assert "GiB is free" in printed


def test_a_context_longer_than_the_model_gives_both_numbers(checkpoint: Path, warmstate: Command) -> None:
    code, printed = warmstate("serve", "--supervised", str(checkpoint), "--max-model-len", "99999999")
    assert code == 2
    assert "engine.max_model_len 99999999 is more than the model's 262144 positions" in printed


def test_a_bad_key_in_the_file_is_named(tmp_path: Path, checkpoint: Path, warmstate: Command) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("engine: {max_sequences: many}\nstore: 5\nmodel:\n")
    code, printed = warmstate(*SERVE, str(checkpoint), "--config", str(file))
    assert code == 2
    assert "engine.max_sequences" in printed
    assert "  store: Input should be" in printed
    assert "model" not in printed
