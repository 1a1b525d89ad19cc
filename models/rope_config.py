"""Owns which rotary embedding a config asks for, in every spelling. What is not served is refused, never ignored."""

import math
from dataclasses import dataclass

from warmstate.models.checkpoints.json_fields import JsonFields
from warmstate.models.errors import UnsupportedCheckpoint

_NAMES = ("rope_parameters", "rope_scaling")
# The sections of mRoPE say which of three position axes turns which pair; of text the three are equal.
_PLAIN_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_YARN_FIELDS = {
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071) as transformers computes it: `factor` times the trained length.

    Pairs that turn more than `beta_fast` times in the trained length keep their frequency, those that turn less than
    `beta_slow` times have it divided by `factor`, and between the two lies a ramp, to whole pairs if `truncate`.
    cos and sin are multiplied by `attention_factor`.
    """

    factor: float
    trained_length: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base, rotated dimensions of each head, and scaling."""

    theta: float
    rotary_dim: int
    yarn: YarnScaling | None = None


def read_rope(top: JsonFields, text: JsonFields, head_dim: int) -> RopeConfig:
    """The rope of `text`, from `rope_parameters` (transformers 5), `rope_scaling` or the flat fields before them.

    `top` is the top level of the file, which may be `text` itself. Raises `UnsupportedCheckpoint` for a scaling that is
    not served and for two places that contradict each other, `CheckpointError` for an impossible value.
    """
    found = _objects(text)
    main = found[0] if found else text
    others = found[1:] if top is text else found[1:] + _objects(top)
    for rope in found[:1] + others:
        _check_fields(rope)
    config = _rope(main, [*found, text], text, head_dim)
    for rope in others:
        if _rope(rope, [*found, text], text, head_dim) != config:
            raise _contradiction(rope, main)
    if top is not text:
        _check_flat_fields(top, config, head_dim)
    return config


def _objects(fields: JsonFields) -> list[JsonFields]:
    return [rope for rope in map(fields.child, _NAMES) if rope is not None and rope.values]


def _check_fields(rope: JsonFields) -> None:
    """Refuses a type that is not served, and any field that would have no effect."""
    given = {name for name in rope.values if rope.has(name)}
    for name in sorted(given):
        if isinstance(rope.values[name], dict):
            raise UnsupportedCheckpoint(
                f"{rope.file}: {rope.where}{name}: another rope for each layer type is not served; state one for all"
            )
    kinds = {_kind(rope, name) for name in ("rope_type", "type") if rope.has(name)} or {"default"}
    if len(kinds) == 2:
        raise UnsupportedCheckpoint(
            f"{rope.file}: {rope.where}rope_type = {rope.values['rope_type']!r} contradicts "
            f"{rope.where}type = {rope.values['type']!r}"
        )
    unused = given - _PLAIN_FIELDS - (_YARN_FIELDS if kinds == {"yarn"} else set())
    if unused:
        name = min(unused)
        raise UnsupportedCheckpoint(
            f"{rope.file}: {rope.where}{name} = {rope.values[name]!r} is not served with rope_type = {min(kinds)!r}"
        )


def _check_flat_fields(top: JsonFields, config: RopeConfig, head_dim: int) -> None:
    """transformers does not read those of a nested config's top level; they may repeat what the text model says."""
    for name, says_the_same in (
        ("rope_theta", lambda value: value == config.theta),
        ("partial_rotary_factor", lambda value: int(head_dim * value) == config.rotary_dim),
    ):
        if top.has(name) and not says_the_same(top.number(name)):
            raise UnsupportedCheckpoint(
                f"{top.file}: {name} = {top.values[name]!r} contradicts text_config; state it there only"
            )


def _kind(rope: JsonFields, name: str) -> str:
    kind = rope.text(name)
    # "mrope" is how older multimodal configs spell default rope with three position axes; text has all three equal.
    if kind == "mrope":
        return "default"
    if kind not in ("default", "yarn"):
        raise UnsupportedCheckpoint(
            f"{rope.file}: {rope.where}{name} = {kind!r}: scaled rope is served as 'yarn' only; "
            "remove it to serve the model at its trained length"
        )
    return kind


def _contradiction(rope: JsonFields, main: JsonFields) -> UnsupportedCheckpoint:
    places = f"{rope.where.rstrip('.')} contradicts {main.where.rstrip('.') or 'the fields beside it'}"
    return UnsupportedCheckpoint(f"{rope.file}: {places}; state one rope, beside num_attention_heads")


def _rope(rope: JsonFields, fallbacks: list[JsonFields], text: JsonFields, head_dim: int) -> RopeConfig:
    """What `rope` asks for; base and share come from the first of `rope` and `fallbacks` that states them."""

    def place_of(name: str) -> JsonFields:
        return next((place for place in (rope, *fallbacks) if place.has(name)), text)

    theta = place_of("rope_theta").number("rope_theta")
    holder = place_of("partial_rotary_factor")
    share = holder.number("partial_rotary_factor", 0.25)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise holder.error("partial_rotary_factor", f"expected an even share of head_dim = {head_dim}", share)
    if rope is text or "yarn" not in (rope.values.get("rope_type"), rope.values.get("type")):
        return RopeConfig(theta, rotary_dim)
    if theta <= 1.0:
        raise place_of("rope_theta").error("rope_theta", "expected more than 1", theta)
    return RopeConfig(theta, rotary_dim, _yarn(rope, text))


def _yarn(rope: JsonFields, text: JsonFields) -> YarnScaling:
    factor = rope.number("factor")
    if factor < 1.0:
        raise rope.error("factor", "expected 1 or more", factor)
    beta_fast, beta_slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if beta_fast <= beta_slow:
        raise rope.error("beta_fast", f"expected more than beta_slow = {beta_slow}", beta_fast)
    truncate = rope.flag("truncate", True)
    return YarnScaling(
        factor, _trained_length(rope, text), _attention_factor(rope, factor), beta_fast, beta_slow, truncate
    )


def _trained_length(rope: JsonFields, text: JsonFields) -> int:
    """Never guessed: the frequencies depend on it, and max_position_embeddings is the old length in some configs and
    the new one in others."""
    name = "original_max_position_embeddings"
    if not text.has(name):
        return rope.integer(name)
    length = text.integer(name)
    if rope.has(name) and rope.integer(name) != length:
        raise rope.error(name, f"expected {text.where}{name} = {length}", rope.integer(name))
    return length


def _attention_factor(rope: JsonFields, factor: float) -> float:
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        return _temperature(factor, rope.number("mscale")) / _temperature(factor, rope.number("mscale_all_dim"))
    return _temperature(factor, 1.0)


def _temperature(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0
