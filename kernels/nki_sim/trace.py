"""Owns the record of what one program issued: engines, costs, memory regions, in program order."""

from dataclasses import dataclass, field

from warmstate.kernels.nki_sim.storage import Storage
from warmstate.kernels.nki_sim.tensor import NkiTensor

Region = tuple[int, int, int, int, int, int]
"""Storage serial, bytes of a row (on chip: a partition), first and last+1 row, first and last+1 byte within each."""

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
        return (storage.serial, storage.raw.nbytes, 0, 1, 0, storage.raw.nbytes)
    spans = [stride * (count - 1) for stride, count in zip(tensor.strides, tensor.shape, strict=True)]
    if not storage.is_on_chip:
        return _memory_region(tensor, spans)
    row = tensor.row
    first, free = divmod(tensor.offset, row)
    bytes_from, bytes_to = free * size, (free + sum(spans[1:]) + 1) * size
    return (storage.serial, storage.partition_bytes, first, first + tensor.shape[0], bytes_from, bytes_to)


def _memory_region(tensor: NkiTensor, spans: list[int]) -> Region:
    """In HBM the rows are those of the view's largest stride, where the rest of it lies within them."""
    storage, size = tensor.storage, tensor.itemsize
    outer = max(range(tensor.ndim), key=spans.__getitem__)
    row, width = tensor.strides[outer], sum(spans) - spans[outer] + 1
    if spans[outer] and width < row and tensor.offset % row + width <= row:
        first, start = divmod(tensor.offset, row)
        last = first + tensor.shape[outer]
        return (storage.serial, row * size, first, last, start * size, (start + width) * size)
    return (storage.serial, storage.raw.nbytes, 0, 1, tensor.offset * size, (tensor.offset + sum(spans) + 1) * size)


def overlap(one: Region, other: Region) -> bool:
    """Whether two regions of one storage share a byte; of rows of different length, whether their bounds do."""
    _, row, first, last, low, high = one
    _, other_row, other_first, other_last, other_low, other_high = other
    if row == other_row:
        return other_first < last and first < other_last and other_low < high and low < other_high
    begin, end = first * row + low, (last - 1) * row + high
    return other_first * other_row + other_low < end and begin < (other_last - 1) * other_row + other_high


def covers(one: Region, other: Region) -> bool:
    """Whether `one` holds all of `other`, as far as rows of one length tell."""
    _, row, first, last, low, high = one
    inside = first <= other[2] and other[3] <= last and low <= other[4] and other[5] <= high
    return row == other[1] and inside
