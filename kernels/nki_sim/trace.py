"""Owns the record of what one program issued: engines, costs, memory regions, in program order."""

from dataclasses import dataclass, field

from warmstate.kernels.nki_sim.storage import Storage
from warmstate.kernels.nki_sim.tensor import NkiTensor

Region = tuple[int, int, int, int, int]
"""Storage serial, first and last+1 partition, first and last+1 byte within each."""

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync")
QUEUES = ("dma-in", "dma-out")


@dataclass(slots=True)
class Instruction:
    """`busy_ns` under the 1N and the 2N rule; dependents wait `latency_ns` longer."""

    engine: str
    operation: str
    busy_ns: tuple[float, float]
    latency_ns: float
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    dma_bytes: int = 0
    issue_engine: str | None = None
    issue_ns: float = 0.0


@dataclass(slots=True)
class Lifetime:
    """First and last instruction that touches an on-chip storage."""

    storage_buffer: str
    partition_bytes: int
    first: int
    last: int


@dataclass
class Trace:
    """What one program issued."""

    instructions: list[Instruction] = field(default_factory=list)
    lifetimes: dict[int, Lifetime] = field(default_factory=dict)

    def add(self, instruction: Instruction, tensors: tuple[NkiTensor, ...]) -> None:
        index = len(self.instructions)
        self.instructions.append(instruction)
        for tensor in tensors:
            self._touch(tensor.storage, index)

    def _touch(self, storage: Storage, index: int) -> None:
        lifetime = self.lifetimes.get(storage.serial)
        if lifetime is not None:
            lifetime.last = index
        elif storage.is_on_chip:
            self.lifetimes[storage.serial] = Lifetime(storage.buffer, storage.partition_bytes, index, index)

    def peak_bytes(self, buffer: str) -> int:
        """The most bytes per partition alive at once, in program order."""
        changes: dict[int, int] = {}
        for life in self.lifetimes.values():
            if life.storage_buffer == buffer:
                changes[life.first] = changes.get(life.first, 0) + life.partition_bytes
                changes[life.last + 1] = changes.get(life.last + 1, 0) - life.partition_bytes
        peak = live = 0
        for index in sorted(changes):
            live += changes[index]
            peak = max(peak, live)
        return peak


def region(tensor: NkiTensor) -> Region:
    """The bounding box of a view; all of the storage where the view gathers."""
    storage, size = tensor.storage, tensor.itemsize
    if tensor.rows is not None:
        return (storage.serial, 0, 1, 0, storage.raw.nbytes)
    spans = [stride * (count - 1) for stride, count in zip(tensor.strides, tensor.shape, strict=True)]
    if not storage.is_on_chip:
        return (storage.serial, 0, 1, tensor.offset * size, (tensor.offset + sum(spans) + 1) * size)
    row = tensor.row
    first, free = divmod(tensor.offset, row)
    return (storage.serial, first, first + tensor.shape[0], free * size, (free + sum(spans[1:]) + 1) * size)
