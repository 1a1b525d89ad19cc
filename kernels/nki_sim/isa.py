"""nki.isa: the instructions that are simulated, gathered under the names of the API."""

from typing import Any

from warmstate.kernels.nki_sim import (
    enums,
    isa_dma,
    isa_elementwise,
    isa_gpsimd,
    isa_reduce,
    isa_registers,
    isa_scalar,
    isa_search,
    isa_tensor,
)
from warmstate.kernels.nki_sim.registers import VirtualRegister

INSTRUCTIONS = {
    isa_tensor: ("nc_matmul", "nc_transpose"),
    isa_scalar: ("activation", "activation_reduce", "activate2", "exponential"),
    isa_elementwise: (
        "tensor_copy",
        "memset",
        "tensor_tensor",
        "tensor_scalar",
        "scalar_tensor_tensor",
        "tensor_copy_predicated",
        "reciprocal",
    ),
    isa_reduce: (
        "tensor_reduce",
        "tensor_scalar_reduce",
        "tensor_scalar_cumulative",
        "tensor_tensor_scan",
        "select_reduce",
        "nc_stream_shuffle",
        "bn_stats",
        "bn_aggr",
    ),
    isa_search: ("max8", "nc_find_index8", "nc_match_replace8"),
    isa_gpsimd: ("iota", "affine_select", "tensor_partition_reduce"),
    isa_dma: ("dma_copy", "dma_transpose"),
    isa_registers: ("register_alloc", "register_move", "register_load", "register_store"),
}
ENUMERATIONS = ("engine", "reduce_cmd", "dge_mode", "oob_mode", "matmul_perf_mode", "nc_version", "dma_engine")
ENGINE_NAMES = ("tensor", "vector", "scalar", "gpsimd", "unknown")


def get_nc_version() -> enums.nc_version:
    """The simulated core is Trainium2's."""
    return enums.nc_version.gen3


def namespace() -> dict[str, Any]:
    """Everything that `nki.isa` offers here."""
    names: dict[str, Any] = {"get_nc_version": get_nc_version, "VirtualRegister": VirtualRegister}
    for module, functions in INSTRUCTIONS.items():
        names |= {name: getattr(module, name) for name in functions}
    names |= {name: getattr(enums, name) for name in ENUMERATIONS}
    return names | {f"{name}_engine": enums.engine[name] for name in ENGINE_NAMES}
