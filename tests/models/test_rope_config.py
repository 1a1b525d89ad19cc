"""Every spelling of rope in config.json is served as transformers computes it, or refused in words; none is ignored."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from warmstate.models.config import ModelConfig, read_config
from warmstate.models.demo.demo_checkpoint import demo_config
from warmstate.models.errors import CheckpointError, UnsupportedCheckpoint
from warmstate.models.rope_config import RopeConfig, YarnScaling

DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
FLAT: dict[str, Any] = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
# As the model cards tell users to write it: Qwen3-Next in `rope_scaling`, Qwen3.5 in `rope_parameters`.
NEXT_CARD: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
CARD: dict[str, Any] = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], **DEFAULT, **NEXT_CARD}
PLAIN = RopeConfig(1e7, 8)
STRETCHED = RopeConfig(1e7, 8, YarnScaling(4.0, 262144, 0.1 * math.log(4.0) + 1.0, 32.0, 1.0, True))


def read(path: Path, family: str, text: dict[str, Any], top: dict[str, Any] | None = None) -> ModelConfig:
    """The config of a family with rope stated by `text` alone, and `top` at the top level."""
    config = demo_config(family, "tiny")
    inner = config.get("text_config", config)
    for name in ("rope_parameters", "rope_theta", "partial_rotary_factor"):
        inner.pop(name, None)
    inner |= text
    (path / "config.json").write_text(json.dumps(config | (top or {})))
    return read_config(path)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (FLAT, PLAIN),
        ({"rope_parameters": DEFAULT}, PLAIN),
        ({"rope_scaling": DEFAULT}, PLAIN),
        (FLAT | {"rope_parameters": {}, "rope_scaling": None}, PLAIN),
        (FLAT | {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}}, PLAIN),
        ({"rope_parameters": DEFAULT, "rope_scaling": DEFAULT}, PLAIN),
        ({"rope_parameters": DEFAULT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, PLAIN),
        # In transformers the object wins over the flat field beside it.
        ({"rope_parameters": DEFAULT, "rope_theta": 1e4}, PLAIN),
        (FLAT | {"rope_scaling": NEXT_CARD}, STRETCHED),
        (FLAT | {"rope_scaling": {**NEXT_CARD, "rope_type": None, "type": "yarn"}}, STRETCHED),
        (FLAT | {"rope_parameters": NEXT_CARD}, STRETCHED),
        ({"rope_parameters": CARD}, STRETCHED),
        ({"rope_scaling": CARD}, STRETCHED),
        ({"rope_parameters": CARD, "rope_scaling": CARD}, STRETCHED),
        ({"rope_parameters": CARD, "rope_scaling": NEXT_CARD}, STRETCHED),
        (FLAT | {"rope_parameters": NEXT_CARD, "original_max_position_embeddings": 262144}, STRETCHED),
    ],
)
def test_a_spelling_is_read_for_what_it_says(
    tmp_path: Path, family: str, rope: dict[str, Any], expected: RopeConfig
) -> None:
    assert read(tmp_path, family, rope).rope == expected


def test_each_setting_of_yarn_is_read(tmp_path: Path) -> None:
    stated = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5}
    yarn = read(tmp_path, "qwen3_5", {"rope_parameters": CARD | stated}).rope.yarn
    assert yarn == YarnScaling(4.0, 262144, 1.5, 16.0, 2.0, False)
    mscales = read(tmp_path, "qwen3_5", {"rope_parameters": CARD | {"mscale": 0.7, "mscale_all_dim": 2}}).rope.yarn
    assert mscales is not None
    assert mscales.attention_factor == pytest.approx((0.07 * math.log(4) + 1) / (0.2 * math.log(4) + 1))
    one = read(tmp_path, "qwen3_5", {"rope_parameters": CARD | {"mscale": 0.7}}).rope.yarn
    assert one == STRETCHED.yarn


@pytest.mark.parametrize("stated", [262144, 1_010_000])
def test_yarn_stretches_the_length_that_can_be_served(tmp_path: Path, stated: int) -> None:
    rope = {"rope_parameters": CARD, "max_position_embeddings": stated}
    assert read(tmp_path, "qwen3_5", rope).max_position_embeddings == 4 * 262144


@pytest.mark.parametrize("rope", [CARD, DEFAULT])
def test_a_top_level_rope_that_says_the_same_is_served(tmp_path: Path, rope: dict[str, Any]) -> None:
    expected = STRETCHED if rope is CARD else PLAIN
    for top in ({"rope_parameters": rope}, {"rope_scaling": rope}):
        assert read(tmp_path, "qwen3_5", {"rope_parameters": rope}, top).rope == expected


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("text", "top"),
    [
        ({"rope_parameters": DEFAULT}, CARD),
        ({"rope_scaling": DEFAULT}, CARD),
        (FLAT, CARD),
        (FLAT, NEXT_CARD),
        ({"rope_parameters": CARD}, DEFAULT),
        ({"rope_parameters": CARD}, CARD | {"factor": 2.0}),
        ({"rope_parameters": DEFAULT}, DEFAULT | {"rope_theta": 1e4}),
    ],
)
def test_a_top_level_rope_that_contradicts_the_text_models_is_refused(
    tmp_path: Path, name: str, text: dict[str, Any], top: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=rf"config\.json: {name} contradicts .*beside num_attention_heads"):
        read(tmp_path, "qwen3_5_moe", text, {name: top})


@pytest.mark.parametrize(("name", "same", "other"), [("rope_theta", 1e7, 1e4), ("partial_rotary_factor", 0.25, 0.5)])
def test_a_flat_field_at_the_top_level_must_repeat_the_text_models(
    tmp_path: Path, name: str, same: float, other: float
) -> None:
    for text, expected in (({"rope_parameters": CARD}, STRETCHED), ({"rope_scaling": DEFAULT}, PLAIN), (FLAT, PLAIN)):
        assert read(tmp_path, "qwen3_5", text, {name: same}).rope == expected
        with pytest.raises(UnsupportedCheckpoint, match=rf"config\.json: {name} = {other} contradicts text_config"):
            read(tmp_path, "qwen3_5", text, {name: other})


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5"])
@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        (DEFAULT, CARD),
        (DEFAULT, NEXT_CARD),
        (CARD, DEFAULT),
        (CARD, {"type": "mrope"}),
        (CARD, CARD | {"factor": 2.0}),
        (CARD, CARD | {"attention_factor": 1.0}),
        (DEFAULT, DEFAULT | {"rope_theta": 5e6}),
        (DEFAULT, DEFAULT | {"partial_rotary_factor": 0.5}),
    ],
)
def test_two_ropes_that_contradict_each_other_are_refused(
    tmp_path: Path, family: str, parameters: dict[str, Any], scaling: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"rope_scaling contradicts .*rope_parameters"):
        read(tmp_path, family, {"rope_parameters": parameters, "rope_scaling": scaling})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "ntk", "llama3", "longrope", "su", "proportional", "axial"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("level", ["flat", "text", "top"])
def test_any_other_scaling_is_refused_wherever_it_stands(
    tmp_path: Path, kind: str, spelling: str, name: str, level: str
) -> None:
    """Beside a rope that is served, too."""
    other = "rope_scaling" if name == "rope_parameters" else "rope_parameters"
    stated = {name: {spelling: kind, "factor": 4.0}}
    for beside in (FLAT, {other: DEFAULT}):
        text, top = (beside, stated) if level == "top" else (beside | stated, {})
        with pytest.raises(UnsupportedCheckpoint, match=rf"{name}\.{spelling} = '{kind}': scaled rope is served as"):
            read(tmp_path, "qwen3_5_text" if level == "flat" else "qwen3_5", text, top)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"full_attention": CARD, "linear_attention": DEFAULT}, "full_attention: another rope for each layer type"),
        (CARD | {"full_attention": CARD}, "full_attention: another rope for each layer type"),
        (DEFAULT | {"type": "yarn"}, "rope_type = 'default' contradicts .*type = 'yarn'"),
        (DEFAULT | {"factor": 4.0}, "factor = 4.0 is not served with rope_type = 'default'"),
        ({"factor": 4.0, "rope_theta": 1e7}, "factor = 4.0 is not served with rope_type = 'default'"),
        (CARD | {"short_factor": [1.0]}, r"short_factor = \[1.0\] is not served with rope_type = 'yarn'"),
        (CARD | {"factor": None}, "factor is missing"),
        (CARD | {"factor": 0.5}, "factor: expected 1 or more, found 0.5"),
        (CARD | {"factor": "4"}, "factor: expected a positive number"),
        (CARD | {"original_max_position_embeddings": None}, "original_max_position_embeddings is missing"),
        (CARD | {"beta_fast": 1}, "beta_fast: expected more than beta_slow = 1.0, found 1.0"),
        (CARD | {"attention_factor": 0}, "attention_factor: expected a positive number"),
        (CARD | {"truncate": "no"}, "truncate: expected true or false"),
        (CARD | {"rope_theta": 1.0}, "rope_theta: expected more than 1, found 1.0"),
    ],
)
def test_an_impossible_rope_is_named(tmp_path: Path, rope: dict[str, Any], message: str) -> None:
    for family, where in (("qwen3_next", "rope_parameters"), ("qwen3_5", r"text_config\.rope_parameters")):
        with pytest.raises(CheckpointError, match=rf"config\.json: {where}\.{message}"):
            read(tmp_path, family, {"rope_parameters": rope})


def test_a_trained_length_that_stands_twice_must_be_one(tmp_path: Path) -> None:
    rope = {"rope_parameters": CARD, "original_max_position_embeddings": 32768}
    with pytest.raises(CheckpointError, match=r"expected text_config\.original_max_position_embeddings = 32768"):
        read(tmp_path, "qwen3_5", rope)
