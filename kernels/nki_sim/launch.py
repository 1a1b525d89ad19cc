"""Owns launching a kernel: arrays in, arrays out, one program per logical core. Knows no instruction.

The two cores of a launch run one after the other; each has its own trace. What a kernel writes into an argument is in
the caller's array afterwards (SDK, `nki/guides/nki_simulator.rst`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from warmstate.kernels.nki_sim.dtypes import CODECS
from warmstate.kernels.nki_sim.errors import ConstraintViolation
from warmstate.kernels.nki_sim.program import Program, is_running, running
from warmstate.kernels.nki_sim.storage import PSUM_PARTITION_BYTES, SBUF_PARTITION_BYTES, Storage
from warmstate.kernels.nki_sim.tensor import NkiTensor
from warmstate.kernels.nki_sim.trace import Trace

TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
TORCH_VIEWS: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32}


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch returned, and what each core issued."""

    outputs: Any
    traces: tuple[Trace, ...]


class Kernel:
    """A function under @nki.jit. Called by a kernel it is inlined; called from outside it is simulated."""

    def __init__(self, function: Callable[..., Any], num_cores: int = 1) -> None:
        self.function, self.num_cores = function, num_cores
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = function.__doc__

    def __getitem__(self, num_cores: int) -> "Kernel":
        if num_cores not in (1, 2):
            raise ConstraintViolation("lnc-count", f"kernel[{num_cores!r}]")
        return Kernel(self.function, num_cores)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if is_running():
            return self.function(*arguments, **keywords)
        return launch(self, *arguments, **keywords).outputs


def jit(fn: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """The decorator @nki.jit, with or without options."""
    return Kernel if fn is None else Kernel(fn)


def simulate(kernel: Kernel | Callable[..., Any]) -> Callable[..., Any]:
    """nki.simulate: a callable over arrays."""
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)


def launch(kernel: Kernel, *arguments: Any, **keywords: Any) -> Launch:
    """Runs every core and checks the outputs and the memory; torch tensors give torch tensors."""
    given = [*arguments, *keywords.values()]
    as_torch = any(isinstance(value, torch.Tensor) for value in given)
    inputs = [_device(value) for value in arguments]
    named = {name: _device(value) for name, value in keywords.items()}
    shared: list[Storage] = []
    traces: list[Trace] = []
    results: Any = None
    for core in range(kernel.num_cores):
        program = Program(core, kernel.num_cores, shared)
        with running(program):
            results = kernel.function(*inputs, **named)
        if core and program.num_shared != len(shared):
            raise ConstraintViolation(
                "same-control-flow", f"core {core} allocates {program.num_shared} of {len(shared)}"
            )
        _check_memory(program.trace)
        traces.append(program.trace)
    held = zip((*arguments, *keywords.values()), (*inputs, *named.values()), strict=True)
    own = set()
    for value, tensor in held:
        if isinstance(tensor, NkiTensor):
            own.add(id(tensor.storage))
            _write_back(value, tensor)
    if isinstance(results, (tuple, list)):
        return Launch(tuple(_host(result, own, as_torch) for result in results), tuple(traces))
    return Launch(None if results is None else _host(results, own, as_torch), tuple(traces))


def _check_memory(trace: Trace) -> None:
    for buffer, limit in (("sbuf", SBUF_PARTITION_BYTES), ("psum", PSUM_PARTITION_BYTES)):
        peak = trace.peak_bytes(buffer)
        if peak > limit:
            raise ConstraintViolation("capacity", f"{peak} bytes of {buffer} alive in a partition of {limit}")


def _device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in CODECS:
            raise ConstraintViolation("known-dtype", f"torch dtype {value.dtype}")
        dense = value.detach().contiguous()
        raw = dense.view(TORCH_BITS[dense.element_size()]).numpy().view(CODECS[dtype].raw)
    elif isinstance(value, np.ndarray):
        dtype, raw = str(value.dtype), value
        if dtype not in CODECS:
            raise ConstraintViolation("known-dtype", f"numpy dtype {value.dtype}")
        raw = raw.astype(CODECS[dtype].raw, copy=False)
    else:
        return value
    storage = Storage(tuple(value.shape), dtype, "shared_hbm", "argument")
    storage.fill(raw)
    return NkiTensor.whole(storage)


def _write_back(value: Any, tensor: NkiTensor) -> None:
    """Puts what the kernel wrote into an argument into the caller's array; arrays of other dtypes stay as they are."""
    raw = tensor.raw()
    if isinstance(value, torch.Tensor):
        bits = value.detach().view(TORCH_BITS[value.element_size()])
        new = torch.from_numpy(raw.view(TORCH_VIEWS[raw.itemsize]))
        if not torch.equal(bits, new):
            bits.copy_(new)
    elif value.dtype == raw.dtype and value.tobytes() != raw.tobytes():
        value[...] = raw


def _host(result: Any, own: set[int], as_torch: bool) -> Any:
    if not isinstance(result, NkiTensor) or (result.buffer != "shared_hbm" and id(result.storage) not in own):
        raise ConstraintViolation("output-shared-hbm", f"{result!r} is returned")
    if not np.all(result.written()):
        missing = int(result.written().size - np.count_nonzero(result.written()))
        raise ConstraintViolation("output-written", f"{missing} elements of {result!r} are not written")
    raw = result.raw().copy()
    if not as_torch and result.dtype in ("bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"):
        return CODECS[result.dtype].decode(raw)
    if not as_torch:
        return raw
    bits = torch.from_numpy(raw.view(TORCH_VIEWS[raw.itemsize]))
    return bits.view(getattr(torch, result.dtype))
