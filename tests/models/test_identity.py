"""Facts that must separate states, and facts that must not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from warmstate.models.checkpoints.identity import namespace_facts
from warmstate.models.errors import CheckpointError


def facts(path: Path, dtype: torch.dtype = torch.float32, deterministic: bool = True) -> dict[str, bytes]:
    return namespace_facts(path, dtype, deterministic)


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


def test_a_copy_elsewhere_has_the_same_facts(demo_checkpoint: Any, tmp_path: Path) -> None:
    path = demo_checkpoint()
    shutil.copytree(path, tmp_path / "elsewhere")
    assert facts(path) == facts(tmp_path / "elsewhere")


def test_another_seed_differs_in_the_weights_alone(demo_checkpoint: Any) -> None:
    """The headers, sizes and configs are equal: only data tells a fine-tune from its base."""
    assert differing(facts(demo_checkpoint(seed=0)), facts(demo_checkpoint(seed=1))) == {"weights"}


def test_one_changed_projection_is_seen(demo_checkpoint: Any, edit_tensors: Any) -> None:
    path = demo_checkpoint("qwen3_next")
    before = facts(path)
    edit_tensors(path, lambda tensors: tensors["model.layers.1.mlp.experts.5.up_proj.weight"].mul_(1.5))
    assert differing(before, facts(path)) == {"weights"}


@pytest.mark.parametrize(
    ("dtype", "deterministic", "changed"),
    [(torch.bfloat16, True, {"dtype"}), (torch.float32, False, {"deterministic"})],
)
def test_dtype_and_mode_are_facts(
    demo_checkpoint: Any, dtype: torch.dtype, deterministic: bool, changed: set[str]
) -> None:
    path = demo_checkpoint()
    assert differing(facts(path), facts(path, dtype, deterministic)) == changed


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_config_and_tokenizer_are_facts(demo_checkpoint: Any, name: str) -> None:
    path = demo_checkpoint()
    before = facts(path)
    content = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(content | {"version": "2"}))
    assert differing(before, facts(path)) == {name}


def test_a_chat_template_changes_nothing(demo_checkpoint: Any) -> None:
    path = demo_checkpoint()
    before = facts(path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    assert facts(path) == before


def test_the_numerics_class_is_named(demo_checkpoint: Any) -> None:
    found = facts(demo_checkpoint())
    assert found["backend"] == b"cpu-torch"
    assert found["torch"].decode() == torch.__version__
    assert found["isa"].decode() == torch.backends.cpu.get_cpu_capability()


def test_a_missing_file_is_a_checkpoint_error(demo_checkpoint: Any) -> None:
    path = demo_checkpoint()
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        facts(path)
