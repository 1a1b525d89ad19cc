"""Owns the estimated time of one instruction, from `cost_constants`. Knows no order and no memory."""

from warmstate.kernels.nki_sim import cost_constants as constants
from warmstate.kernels.nki_sim.dtypes import FULL_FLOATS, TWO_BYTE_FLOATS
from warmstate.kernels.nki_sim.tensor import NkiTensor

GHZ = {
    "tensor": constants.TENSOR_GHZ,
    "vector": constants.VECTOR_GHZ,
    "scalar": constants.SCALAR_GHZ,
    "gpsimd": constants.GPSIMD_GHZ,
}

Busy = tuple[float, float]
"""Nanoseconds under the 1N and the 2N rule."""


def latency_ns(engine: str) -> float:
    """How long after an instruction's end its dependents start."""
    cycles = constants.TENSOR_LATENCY_CYCLES if engine == "tensor" else constants.ENGINE_LATENCY_CYCLES
    return cycles / GHZ[engine]


def one_input(engine: str, elements: float, extra_cycles: int = 0) -> Busy:
    """An instruction that reads one tile of `elements` per partition."""
    ns = (max(constants.ENGINE_MIN_CYCLES, elements) + extra_cycles) / GHZ[engine]
    return ns, ns


def two_inputs(engine: str, elements: float) -> Busy:
    """An instruction that reads two tiles."""
    one, two = (max(constants.ENGINE_MIN_CYCLES, f * elements) / GHZ[engine] for f in constants.TWO_INPUT_FACTORS)
    return one, two


def copy_like(engine: str, dst: NkiTensor, data: NkiTensor) -> Busy:
    """tensor_copy and tensor_scalar, with the vector engine's performance mode."""
    speedup = 1
    if engine == "vector" and dst.dtype in TWO_BYTE_FLOATS and data.dtype in TWO_BYTE_FLOATS:
        in_sbuf = dst.buffer == "sbuf" and data.buffer == "sbuf"
        dense = dst.strides[-1] == 1 and data.strides[-1] == 1
        if in_sbuf and dense:
            speedup = constants.VECTOR_FAST_COPY
        elif in_sbuf or (dense and "sbuf" in (dst.buffer, data.buffer)):
            speedup = constants.VECTOR_FAST_COPY_PSUM
    return one_input(engine, data.num_free / speedup)


def tensor_tensor(engine: str, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor) -> Busy:
    """Two tiles, element by element."""
    narrow = all(tensor.dtype in TWO_BYTE_FLOATS for tensor in (dst, data1, data2))
    fast = engine == "vector" and narrow and data1.buffer == data2.buffer == "sbuf"
    return two_inputs(engine, data1.num_free / (constants.VECTOR_FAST_TENSOR if fast else 1))


def matmul(stationary: NkiTensor, moving: NkiTensor, onezero: bool, double: bool) -> Busy:
    """The slower of streaming the moving tile and loading the next stationary tile in the background."""
    columns = moving.num_free / (2 if double else 1)
    factor: float = constants.FLOAT32_MATMUL_FACTOR if moving.dtype == "float32" else 1
    if onezero and moving.dtype == "float32":
        factor /= constants.FLOAT32_ONEZERO_SPEEDUP
    stream = max(constants.MATMUL_MIN_CYCLES, columns) * factor
    load = stationary.num_free / constants.LOAD_STATIONARY_SPEEDUP * factor
    ns = max(stream, load) / constants.TENSOR_GHZ
    return ns, ns


def transpose(data: NkiTensor) -> Busy:
    """A transpose on the tensor engine moves the identity: as many columns as the data has partitions."""
    factor = constants.FLOAT32_TRANSPOSE_FACTOR if data.dtype in FULL_FLOATS or data.itemsize == 4 else 1
    ns = max(constants.MATMUL_MIN_CYCLES, data.shape[0]) * factor / constants.TENSOR_GHZ
    return ns, ns


def dma(num_bytes: int, run_bytes: int, efficiency: float) -> Busy:
    """A transfer made of contiguous runs of `run_bytes`."""
    num_runs = num_bytes / run_bytes
    ns = num_runs * (run_bytes + constants.DMA_ROW_OVERHEAD_BYTES) / constants.DMA_BYTES_PER_NS / efficiency
    return ns, ns
