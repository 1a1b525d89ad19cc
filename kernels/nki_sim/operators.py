"""Owns what instructions take as `op`: the operators of the ALU and the functions of the scalar engine.

SHARED nki-aluop and nki-act-func.
Float arithmetic is float32; overflow and NaN follow IEEE, as on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from warmstate.kernels.nki_sim.dtypes import Array
from warmstate.kernels.nki_sim.errors import SimulatorError


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

    def __call__(self, *_arguments: Any, **_keywords: Any) -> Any:
        raise SimulatorError(f"nl.{self.name}() on tensors is experimental and not simulated: use nki.isa")

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
    Operator("silu", "activation", activation=lambda x: x * _sigmoid(x)),
    Operator("softplus", "activation", activation=_softplus),
    Operator("gelu_apprx_tanh", "activation", activation=_gelu_tanh),
    Operator("sign", "activation", activation=np.sign),
)

OPERATORS: dict[str, Operator] = {op.name: op for op in (*ALU_OPERATORS, *UNARY_OPERATORS, *ACTIVATIONS)}
SIGNED_RANGE = ("reciprocal",)
"""Activations whose valid range is of the magnitude; the others take positive inputs only."""

CUMULATIVE = ("add", "subtract", "multiply", "maximum", "minimum")
COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
