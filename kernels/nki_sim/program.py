"""Owns the running program: which core it is, its trace, its allocations and its accumulators. Knows no instruction."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from warmstate.kernels.nki_sim.dtypes import Array
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.storage import Storage
from warmstate.kernels.nki_sim.tensor import NkiTensor
from warmstate.kernels.nki_sim.trace import Instruction, Trace


@dataclass
class Program:
    """One core's run of a kernel. `shared` are the shared allocations of the launch, in order of allocation."""

    core: int
    num_cores: int
    shared: list[Storage]
    trace: Trace = field(default_factory=Trace)
    num_shared: int = 0
    accumulators: dict[str, Array] = field(default_factory=dict)

    def allocate(self, shape: tuple[int, ...], dtype: str, buffer: str, name: str) -> NkiTensor:
        if buffer != "shared_hbm":
            return NkiTensor.whole(Storage(shape, dtype, buffer, name))
        if self.num_shared == len(self.shared):
            if self.core:
                raise ConstraintViolation("same-control-flow", f"core {self.core} allocates {dtype}{list(shape)} alone")
            self.shared.append(Storage(shape, dtype, buffer, name))
        storage = self.shared[self.num_shared]
        if (storage.shape, storage.dtype) != (shape, dtype):
            raise ConstraintViolation("same-control-flow", f"{storage.shape} on core 0, {shape} on core {self.core}")
        self.num_shared += 1
        return NkiTensor.whole(storage)


_running: list[Program] = []


def current() -> Program:
    """The program that issues instructions now."""
    if not _running:
        raise ConstraintViolation("inside-kernel", "no kernel is running")
    return _running[-1]


def is_running() -> bool:
    return bool(_running)


@contextmanager
def running(program: Program) -> Iterator[None]:
    _running.append(program)
    try:
        yield
    finally:
        _running.pop()


def record(instruction: Instruction, *tensors: NkiTensor) -> None:
    current().trace.add(instruction, tensors)
