"""Owns what instructions take as `op`: the operators of the ALU and the functions of the scalar engine.

SHARED nki-aluop and nki-act-func.
Float arithmetic is float32; overflow and NaN follow IEEE, as on the device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from warmstate.kernels.nki_sim.dtypes import Array

GELU_SLOPE = 1.702
"""Of the sigmoid that approximates the normal distribution: https://arxiv.org/abs/1606.08415."""


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """`kind` is bitvec, arithmetic, unary (one operand on the ALU) or activation (scalar engine only).

    `accumulate` reduces where that is legal; `valid` bounds the magnitude of an activation's input.
    """

    name: str
    kind: str
    function: Callable[..., Array] | None = None
    accumulate: Any = None
    identity: float = 0.0
    activation: Callable[[Array], Array] | None = None
    valid: tuple[float, float] | None = None

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _float(condition: Array) -> Array:
    return condition.astype(np.float32)


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0 / (1.0 + small), small / (1.0 + small)).astype(np.float32)


def _softplus(x: Array) -> Array:
    return (np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)).astype(np.float32)


def _gelu_tanh(x: Array) -> Array:
    inner = 0.7978845608028654 * (x + 0.044715 * x**3)
    result: Array = (0.5 * x * (1 + np.tanh(inner))).astype(np.float32)
    return result


def _erf(x: Array) -> Array:
    result: Array = torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()
    return result


def _erf_dx(x: Array) -> Array:
    result: Array = (2 / math.sqrt(math.pi) * np.exp(-np.square(x))).astype(np.float32)
    return result


def _gelu(x: Array) -> Array:
    result: Array = (0.5 * x * (1 + _erf(x / math.sqrt(2)))).astype(np.float32)
    return result


def _gelu_dx(x: Array) -> Array:
    density: Array = np.exp(-0.5 * np.square(x)) / math.sqrt(2 * math.pi)
    result: Array = (0.5 * (1 + _erf(x / math.sqrt(2))) + x * density).astype(np.float32)
    return result


def _sigmoid_unit(x: Array, slope: float) -> Array:
    result: Array = (x * _sigmoid(slope * x)).astype(np.float32)
    return result


def _sigmoid_unit_dx(x: Array, slope: float) -> Array:
    gate = _sigmoid(slope * x)
    result: Array = (gate + slope * x * gate * (1 - gate)).astype(np.float32)
    return result


def _compare(name: str, function: Callable[[Array, Array], Array]) -> Operator:
    return Operator(name, "arithmetic", lambda a, b: _float(function(a, b)))


def _shift(function: Any) -> Callable[[Array, Array], Array]:
    def shifted(values: Array, by: Array) -> Array:
        result: Array = function(values, np.asarray(by).astype(values.dtype))
        return result

    return shifted


ALU_OPERATORS = (
    Operator("add", "arithmetic", np.add, np.add),
    Operator("subtract", "arithmetic", np.subtract, np.subtract),
    Operator("multiply", "arithmetic", np.multiply, np.multiply, 1.0),
    Operator("divide", "arithmetic", np.divide),
    Operator("maximum", "arithmetic", np.maximum, np.maximum, -np.inf),
    Operator("minimum", "arithmetic", np.minimum, np.minimum, np.inf),
    Operator("power", "arithmetic", np.power),
    Operator("abs_max", "arithmetic", lambda a, b: np.maximum(np.abs(a), np.abs(b))),
    Operator("abs_min", "arithmetic", lambda a, b: np.minimum(np.abs(a), np.abs(b))),
    _compare("equal", np.equal),
    _compare("not_equal", np.not_equal),
    _compare("greater", np.greater),
    _compare("greater_equal", np.greater_equal),
    _compare("less", np.less),
    _compare("less_equal", np.less_equal),
    _compare("logical_and", np.logical_and),
    _compare("logical_or", np.logical_or),
    _compare("logical_xor", np.logical_xor),
    Operator("bitwise_and", "bitvec", np.bitwise_and, np.bitwise_and, -1),
    Operator("bitwise_or", "bitvec", np.bitwise_or, np.bitwise_or),
    Operator("bitwise_xor", "bitvec", np.bitwise_xor, np.bitwise_xor),
    Operator("left_shift", "bitvec", _shift(np.left_shift)),
    Operator("right_shift", "bitvec", _shift(np.right_shift)),
    Operator("bypass", "arithmetic", lambda a, _b: a),
)

UNARY_OPERATORS = (
    Operator("abs", "unary", np.abs, activation=np.abs),
    Operator("square", "unary", np.square, activation=np.square),
    Operator("relu", "unary", lambda x: np.maximum(x, 0), activation=lambda x: np.maximum(x, 0)),
    Operator(
        "rsqrt", "unary", lambda x: 1 / np.sqrt(x), activation=lambda x: 1 / np.sqrt(x), valid=(2.0**-87, 2.0**97)
    ),
    Operator("reciprocal", "unary", lambda x: 1 / x, activation=lambda x: 1 / x, valid=(2.0**-42, 2.0**42)),
)

ACTIVATIONS = (
    Operator("copy", "activation", activation=lambda x: x),
    Operator("exp", "activation", activation=np.exp),
    Operator("log", "activation", activation=np.log, valid=(2.0**-64, 2.0**64)),
    Operator("sqrt", "activation", activation=np.sqrt, valid=(2.0**-116, 2.0**118)),
    Operator("tanh", "activation", activation=np.tanh),
    Operator("sigmoid", "activation", activation=_sigmoid),
    Operator("silu", "activation", activation=lambda x: _sigmoid_unit(x, 1.0)),
    Operator("silu_dx", "activation", activation=lambda x: _sigmoid_unit_dx(x, 1.0)),
    Operator("softplus", "activation", activation=_softplus),
    Operator("gelu", "activation", activation=_gelu),
    Operator("gelu_dx", "activation", activation=_gelu_dx),
    Operator("gelu_apprx_tanh", "activation", activation=_gelu_tanh),
    Operator("gelu_apprx_sigmoid", "activation", activation=lambda x: _sigmoid_unit(x, GELU_SLOPE)),
    Operator("gelu_apprx_sigmoid_dx", "activation", activation=lambda x: _sigmoid_unit_dx(x, GELU_SLOPE)),
    Operator("mish", "activation", activation=lambda x: x * np.tanh(_softplus(x))),
    Operator("erf", "activation", activation=_erf),
    Operator("erf_dx", "activation", activation=_erf_dx),
    Operator("sin", "activation", activation=np.sin, valid=(0.0, math.pi)),
    Operator("arctan", "activation", activation=np.arctan, valid=(0.0, math.pi / 2)),
    Operator("sign", "activation", activation=np.sign),
)

OPERATORS: dict[str, Operator] = {op.name: op for op in (*ALU_OPERATORS, *UNARY_OPERATORS, *ACTIVATIONS)}
SIGNED_RANGE = ("reciprocal", "sin", "arctan")
"""Activations whose valid range is of the magnitude; the others take positive inputs only."""

CUMULATIVE = ("add", "subtract", "multiply", "maximum", "minimum")
COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
