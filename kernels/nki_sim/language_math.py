"""nki.language on tiles: the experimental wrappers that issue an instruction into a new tile. LANG, the same names.

The operators are themselves: `nl.add` is what an instruction takes as `op`, and can be called on tiles. NOTES 2.29 and
2.30 say what the wrappers do not do on a device: no broadcasting, no division, no power of a number.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from warmstate.kernels.nki_sim import isa_dma, isa_elementwise, isa_reduce, isa_scalar, isa_tensor
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.operators import OPERATORS, Operator
from warmstate.kernels.nki_sim.program import current
from warmstate.kernels.nki_sim.storage import PSUM_BANK_BYTES
from warmstate.kernels.nki_sim.tensor import NkiTensor

Axis = int | tuple[int, ...] | list[int]

NOT_ON_THE_DEVICE = ("divide",)
PI = 3.1415925
"""The largest float32 that is not above pi."""

MATMUL_COLUMNS = PSUM_BANK_BYTES // 4


def _tile(shape: tuple[int, ...], dtype: str, buffer: str = "sbuf") -> NkiTensor:
    return current().allocate(tuple(shape), dtype, buffer, "")


class TileOperator(Operator):
    """An operator that can also be called on tiles: unary on the scalar engine, binary on the vector engine."""

    __slots__ = ()

    def __call__(self, x: Any, y: Any = None, dtype: str | None = None) -> NkiTensor:
        """A new tile op(x) or x op y, of x's dtype unless `dtype` says otherwise; one of x, y may be a number."""
        if self.name in NOT_ON_THE_DEVICE:
            raise ConstraintViolation("language-operator", f"nl.{self.name}")
        if y is None:
            return self._unary(x, dtype)
        if not isinstance(x, NkiTensor):
            return self._with_number(y, x, True, dtype)
        if not isinstance(y, NkiTensor):
            return self._with_number(x, y, False, dtype)
        if x.shape != y.shape:
            raise ConstraintViolation("language-broadcast", f"nl.{self.name} of {x!r} and {y!r}")
        result = _tile(x.shape, dtype or x.dtype)
        isa_elementwise.tensor_tensor(result, x, y, self)
        return result

    def _unary(self, x: NkiTensor, dtype: str | None) -> NkiTensor:
        result = _tile(x.shape, dtype or x.dtype)
        isa_scalar.activation(result, self, _within_a_turn(x) if self.name == "sin" else x)
        return result

    def _with_number(self, tile: NkiTensor, number: float, reverse: bool, dtype: str | None) -> NkiTensor:
        if self.name == "power":
            raise ConstraintViolation("language-operator", f"nl.power of {tile!r} and a number")
        result = _tile(tile.shape, dtype or tile.dtype)
        isa_elementwise.tensor_scalar(result, tile, self, number, reverse0=reverse)
        return result


def _within_a_turn(x: NkiTensor) -> NkiTensor:
    """x less whole turns, from -pi to pi: nl.sin does this before the activation, which must have it (SHARED)."""
    whole, turns, angle = _tile(x.shape, "int32"), _tile(x.shape, "float32"), _tile(x.shape, "float32")
    isa_elementwise.tensor_scalar(whole, x, OPERATORS["multiply"], 0.5 / math.pi)
    isa_elementwise.tensor_copy(turns, whole)
    isa_elementwise.scalar_tensor_tensor(angle, turns, OPERATORS["multiply"], -2 * math.pi, OPERATORS["add"], x)
    least, most = OPERATORS["maximum"], OPERATORS["minimum"]
    isa_elementwise.tensor_scalar(angle, angle, least, -PI, op1=most, operand1=PI)
    return angle


class Reduction(TileOperator):
    """nl.max and nl.min: the operator of an instruction, and a reduction when it is called."""

    __slots__ = ()

    def __call__(self, x: Any, axis: Any = -1, dtype: str | None = None, keepdims: bool = False) -> NkiTensor:
        return _reduced(self, x, axis, dtype, keepdims)


def _reduced(op: Operator, x: NkiTensor, axis: Axis, dtype: str | None, keepdims: bool) -> NkiTensor:
    """A new tile: x reduced over its last free dimensions."""
    axes = sorted(a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis))
    shape = [1 if dim in axes else size for dim, size in enumerate(x.shape)]
    if not keepdims:
        shape = [size for dim, size in enumerate(x.shape) if dim not in axes]
    if len(shape) < 2:
        shape.append(1)
    result = _tile(tuple(shape), dtype or x.dtype)
    isa_reduce.tensor_reduce(result, op, x, tuple(axes))
    return result


def sum_of(x: NkiTensor, axis: Axis, dtype: str | None = None, keepdims: bool = False) -> NkiTensor:
    """nl.sum."""
    return _reduced(OPERATORS["add"], x, axis, dtype, keepdims)


def mean_of(x: NkiTensor, axis: Axis, dtype: str | None = None, keepdims: bool = False) -> NkiTensor:
    """nl.mean, with a float32 sum."""
    total = _reduced(OPERATORS["add"], x, axis, "float32", keepdims)
    result = _tile(total.shape, dtype or x.dtype)
    isa_elementwise.tensor_scalar(result, total, OPERATORS["multiply"], total.size / x.size)
    return result


def softmax(x: NkiTensor, axis: Axis = -1, dtype: str | None = None) -> NkiTensor:
    """exp(x - max) / sum over all free dimensions."""
    column = (x.shape[0], 1)
    peak, total, result = _tile(column, "float32"), _tile(column, "float32"), _tile(x.shape, dtype or x.dtype)
    axes = sorted(a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis))
    if axes != list(range(1, x.ndim)):
        raise ConstraintViolation("reduce-axes", f"softmax over {axis} of {x!r}")
    isa_reduce.tensor_reduce(peak, OPERATORS["maximum"], x, tuple(axes), negate=True)
    powers = _tile(x.shape, "float32")
    isa_scalar.activation_reduce(powers, OPERATORS["exp"], x, OPERATORS["add"], total, bias=peak)
    isa_elementwise.reciprocal(total, total)
    isa_elementwise.tensor_scalar(result, powers, OPERATORS["multiply"], total)
    return result


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """A PSUM tile x.T @ y; without transpose_x the wrapper fails on a device (NOTES 2.30)."""
    if not transpose_x:
        raise ConstraintViolation("language-operator", "nl.matmul without transpose_x=True")
    result = _tile((x.num_free, y.num_free), "float32", "psum")
    isa_tensor.nc_matmul(result, x, y)
    return result


def transpose(x: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """A PSUM tile with partitions and free elements exchanged."""
    result = _tile((x.num_free, x.shape[0]), dtype or x.dtype, "psum")
    isa_tensor.nc_transpose(result, x)
    return result


def load_transpose2d(src: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """A new SBUF tile: the HBM tensor [R, C] as [C, R]."""
    result = _tile(src.shape[::-1], dtype or src.dtype)
    isa_dma.dma_transpose(result, src)
    return result


def broadcast_to(x: NkiTensor, shape: Any, dtype: str | None = None) -> NkiTensor:
    """x with dimensions of size 1 repeated: free ones as a view, the partition dimension on the tensor engine.

    A partition is spread by a product with ones (TRN1, fast partition broadcast), into a new tile.
    """
    if len(shape) != x.ndim:
        raise ConstraintViolation("broadcast-rank", f"{x!r} to {tuple(shape)}")
    view = x if x.shape[0] == shape[0] else _spread(x, shape[0], dtype or x.dtype)
    for dim, size in enumerate(shape):
        if view.shape[dim] != size:
            view = view.broadcast(dim, size)
    if dtype not in (None, view.dtype):
        cast = _tile(view.shape, str(dtype))
        isa_elementwise.tensor_copy(cast, view)
        return cast
    return view


def _spread(row: NkiTensor, partitions: int, dtype: str) -> NkiTensor:
    """[1, ...] in every one of `partitions` partitions."""
    if row.shape[0] != 1:
        raise ConstraintViolation("broadcast-size-1", f"dimension 0 of {row!r}")
    ones = _tile((1, partitions), row.dtype)
    isa_elementwise.memset(ones, 1.0)
    result, flat = _tile((partitions, row.num_free), dtype), row.reshape((1, row.num_free))
    for start in range(0, row.num_free, MATMUL_COLUMNS):
        own = slice(start, min(start + MATMUL_COLUMNS, row.num_free))
        spread = _tile((partitions, own.stop - own.start), "float32", "psum")
        isa_tensor.nc_matmul(spread, ones, flat[:, own], is_stationary_onezero=True)
        isa_elementwise.tensor_copy(result[:, own], spread)
    return result.reshape((partitions, *row.shape[1:]))


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    return x.expand_dim(axis)


def _as(kind: type[TileOperator], op: Operator) -> TileOperator:
    return kind(**{field.name: getattr(op, field.name) for field in dataclasses.fields(op)})


def namespace() -> dict[str, Any]:
    """What `nki.language` offers on tiles, by name."""
    names: dict[str, Any] = {name: _as(TileOperator, op) for name, op in OPERATORS.items()}
    names |= {"max": _as(Reduction, OPERATORS["maximum"]), "min": _as(Reduction, OPERATORS["minimum"])}
    functions: tuple[Callable[..., Any], ...] = (
        softmax,
        matmul,
        transpose,
        load_transpose2d,
        broadcast_to,
        expand_dims,
    )
    return names | {"sum": sum_of, "mean": mean_of} | {function.__name__: function for function in functions}
