"""A running program to issue single instructions in, and tiles to issue them on."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from warmstate.kernels.nki_sim import isa, language
from warmstate.kernels.nki_sim.program import Program, running


class Bench:
    """The simulator's nl and nisa, and written tensors of any kind."""

    def __init__(self) -> None:
        self.nl: Any = SimpleNamespace(**language.namespace())
        self.isa: Any = SimpleNamespace(**isa.namespace())

    def tile(self, partitions: int = 128, free: int = 64, dtype: str = "float32", buffer: str = "sbuf") -> Any:
        tensor = self.nl.ndarray((partitions, free), dtype, buffer)
        self.isa.memset(tensor, 0)
        return tensor

    def psum(self, partitions: int = 128, free: int = 64, dtype: str = "float32") -> Any:
        return self.tile(partitions, free, dtype, "psum")

    def fresh(self, *shape: int, dtype: str = "float32", buffer: str = "sbuf") -> Any:
        return self.nl.ndarray(shape, dtype, buffer)

    def hbm(self, *shape: int, dtype: str = "float32") -> Any:
        tensor = self.nl.ndarray(shape, dtype, "private_hbm")
        tensor.write(np.zeros(shape, dtype=np.float32))
        return tensor

    def of(self, values: Any, dtype: str = "float32", buffer: str = "sbuf") -> Any:
        """A tensor that holds `values`."""
        array = np.asarray(values)
        tensor = self.nl.ndarray(array.shape, dtype, buffer)
        tensor.write(array)
        return tensor

    def after(
        self, instruction: Callable[[Any], None], *shape: int, dtype: str = "float32", buffer: str = "sbuf"
    ) -> Any:
        """What `instruction` writes into a fresh tile, as values."""
        dst = self.fresh(*shape, dtype=dtype, buffer=buffer)
        instruction(dst)
        return dst.read()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with running(Program(0, 1, [])):
        yield Bench()
