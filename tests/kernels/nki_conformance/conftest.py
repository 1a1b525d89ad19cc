"""Kernels of one instruction or a few, through the public API alone: `nki.simulate` of AWS's nki where it is installed.

Nothing of our simulator is looked at here but its errors, so that what is stated of an operation can be asked of both.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from warmstate.kernels.nki_sim import install
from warmstate.kernels.nki_sim.errors import SimulatorError

KEPT_DTYPES = ("float32", "float16", "int32", "uint32", "int16", "uint16", "int8", "uint8")
"""What numpy has; other dtypes leave a kernel as float32."""


class Bench:
    """nki, nl and nisa, written tensors of any kind for use inside a kernel, and the launch of a kernel."""

    def __init__(self) -> None:
        with install.real_or_simulated():
            self.nki, self.nl, self.isa = map(importlib.import_module, ("nki", "nki.language", "nki.isa"))
        self.is_real = install.has_real_nki()
        self.refusal: type[Exception] = Exception if self.is_real else SimulatorError

    def launch(self, kernel: Callable[..., Any], *arguments: Any, cores: int = 1) -> Any:
        """What `kernel` returns for the arrays `arguments`."""
        given = arguments or (np.zeros((1, 1), np.float32),)
        return self.nki.simulate(self.nki.jit(kernel)[cores])(*given)

    def run(self, body: Callable[[], Any]) -> Any:
        """Runs `body` in a kernel; the tensors that it returns come back as arrays."""

        def kernel(_x: Any) -> Any:
            made = body()
            if made is None:
                made = self.tile(1, 1)
            return tuple(map(self._out, made)) if isinstance(made, tuple) else self._out(made)

        return self.launch(kernel)

    def after(
        self, instruction: Callable[[Any], None], *shape: int, dtype: str = "float32", buffer: str = "sbuf"
    ) -> Any:
        """What `instruction` writes into a fresh tile, in a kernel of its own."""

        def body() -> Any:
            dst = self.fresh(*shape, dtype=dtype, buffer=buffer)
            instruction(dst)
            return dst

        return self.run(body)

    def fresh(self, *shape: int, dtype: str = "float32", buffer: str = "sbuf") -> Any:
        return self.nl.ndarray(shape, getattr(self.nl, dtype), buffer=getattr(self.nl, buffer))

    def tile(self, partitions: int = 128, free: int = 64, dtype: str = "float32", buffer: str = "sbuf") -> Any:
        """Zeros."""
        tensor = self.fresh(partitions, free, dtype=dtype, buffer=buffer)
        self.isa.memset(tensor, 0 if "int" in dtype else 0.0)
        return tensor

    def psum(self, partitions: int = 128, free: int = 64, dtype: str = "float32") -> Any:
        return self.tile(partitions, free, dtype, "psum")

    def hbm(self, *shape: int, dtype: str = "float32") -> Any:
        return self.of(np.zeros(shape), dtype, "private_hbm")

    def of(self, values: Any, dtype: str = "float32", buffer: str = "sbuf") -> Any:
        """A tensor that holds `values`."""
        array = np.asarray(values).astype(dtype if "int" in dtype else "float32")
        constant = self.nl.shared_constant(array)
        tensor = self.fresh(*array.shape, dtype=dtype, buffer="sbuf" if buffer == "psum" else buffer)
        self.isa.dma_copy(tensor, constant)
        if buffer != "psum":
            return tensor
        moved = self.fresh(*array.shape, dtype=dtype, buffer="psum")
        self.isa.tensor_copy(moved, tensor)
        return moved

    def _out(self, tensor: Any) -> Any:
        kept = tensor.dtype in [getattr(self.nl, name) for name in KEPT_DTYPES]
        dtype = tensor.dtype if kept else self.nl.float32
        out = self.nl.ndarray(tensor.shape, dtype, buffer=self.nl.shared_hbm)
        if tensor.buffer == self.nl.psum:
            on_sbuf = self.nl.ndarray(tensor.shape, tensor.dtype, buffer=self.nl.sbuf)
            self.isa.tensor_copy(on_sbuf, tensor)
            tensor = on_sbuf
        self.isa.dma_copy(out, tensor)
        return out


@pytest.fixture(scope="session")
def bench() -> Bench:
    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    return Bench()
