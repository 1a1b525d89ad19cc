"""Owns the scalar registers of the engine sequencers."""

from warmstate.kernels.nki_sim.errors import ConstraintViolation


class VirtualRegister:
    """One 32-bit integer, unset until something moves or loads a value into it."""

    __slots__ = ("_value",)

    def __init__(self, value: int | None = None) -> None:
        self._value: int | None = None
        if value is not None:
            self.set(value)

    def value(self) -> int:
        if self._value is None:
            raise ConstraintViolation("register-value", "the register is read before it is set")
        return self._value

    def set(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**32:
            raise ConstraintViolation("register-value", f"{value!r}")
        self._value = value
