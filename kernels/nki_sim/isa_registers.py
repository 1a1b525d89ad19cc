"""Registers: register_alloc, register_move, register_load, register_store. ISA, the same names."""

from warmstate.kernels.nki_sim.dtypes import CODECS
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.registers import VirtualRegister
from warmstate.kernels.nki_sim.tensor import NkiTensor


def register_alloc(x: int | None = None) -> VirtualRegister:
    return VirtualRegister(x)


def register_move(dst: VirtualRegister, src: "int | VirtualRegister") -> None:
    dst.set(src.value() if isinstance(src, VirtualRegister) else src)


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """Reads the one element of src."""
    _check_element(src)
    dst.set(int(src.read().reshape(-1)[0]))


def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """Writes the register into the one element of dst."""
    _check_element(dst)
    dst.write(CODECS[dst.dtype].encode(dst.raw() * 0 + src.value()))


def _check_element(tensor: NkiTensor) -> None:
    if tensor.size != 1 or tensor.buffer == "psum" or CODECS[tensor.dtype].is_float:
        raise ConstraintViolation("register-value", f"{tensor!r}")
