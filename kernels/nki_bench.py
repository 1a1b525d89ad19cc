"""Owns the estimates of the NKI kernels: one launch of each for a shape, in the simulator. Knows no command line."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from warmstate.kernels import gdn_constants
from warmstate.kernels.nki_sim import cost_constants
from warmstate.kernels.nki_sim.errors import SimulatorError
from warmstate.kernels.nki_sim.install import installed
from warmstate.kernels.nki_sim.launch import Kernel, Launch, launch
from warmstate.kernels.nki_sim.schedule import Estimate, estimate

HEAD = 128
ATTENTION_HEAD = 256
PAGE = 64
CHECKPOINT_CHUNKS = 2
HIDDEN = 2048
EXPERTS, CHOSEN = 512, 10


@dataclass(frozen=True, slots=True)
class Shape:
    """`tokens` per sequence (cached tokens, for a decode), `batch` sequences, `heads` value or query heads."""

    tokens: int = 2048
    batch: int = 1
    heads: int = 1


@dataclass(frozen=True, slots=True)
class Floor:
    """What DMA alone takes, in microseconds; both figures from AWS's DMA bandwidth guide, as `cost_constants` has them.

    `bytes_us` is the bytes that must move at the full bandwidth of all 16 engines, and nothing else: no latency, no
    overhead of short runs. `chain_us` adds the fixed latency of one read and of one write that depends on it, without
    which no result is stored. A kernel whose addresses are looked up first waits once more: that is not in the floor.
    """

    bytes_us: float
    chain_us: float


@dataclass(frozen=True, slots=True)
class Bench:
    """One kernel at one shape and dtype, as the simulator estimates it on one core.

    `floor` is given where memory bounds the kernel.
    """

    kernel: str
    shape: Shape
    dtype: torch.dtype
    estimate: Estimate
    floor: Floor | None


Case = Callable[[Shape, torch.dtype], Launch]


def kernel_names() -> tuple[str, ...]:
    return tuple(_CASES)


def bench(kernel: str, shape: Shape, dtype: torch.dtype) -> Bench:
    """Runs `kernel` once, on random inputs.

    Raises SimulatorError where the real nki is installed, or where the kernel refuses the shape: kernels do so by
    assertions while they are traced.
    """
    try:
        made = _CASES[kernel](shape, dtype)
    except AssertionError as refusal:
        raise SimulatorError(f"the kernel does not take this shape: {refusal}") from refusal
    floor = _floor(_FLOOR_BYTES[kernel](shape, dtype)) if kernel in _FLOOR_BYTES else None
    return Bench(kernel, shape, dtype, estimate(made.traces), floor)


def _floor(num_bytes: int) -> Floor:
    bytes_us = num_bytes / cost_constants.DMA_BYTES_PER_NS / 1e3
    return Floor(bytes_us, bytes_us + 2 * cost_constants.DMA_LATENCY_NS / 1e3)


def _kernel(module: str, name: str) -> Kernel:
    with installed():
        kernel: Kernel = getattr(importlib.import_module(f"warmstate.kernels.{module}"), name)
    return kernel


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _unit(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.functional.normalize(_normal(*shape), dim=-1).to(dtype)


def _gdn_prefill(shape: Shape, dtype: torch.dtype) -> Launch:
    """Options off, one key head per value head, a checkpoint every 256 tokens."""
    q = _unit(shape.batch, shape.heads, shape.tokens, HEAD, dtype=dtype)
    gates = torch.rand(shape.batch, shape.heads, shape.tokens, generator=torch.Generator().manual_seed(0))
    value = _normal(shape.batch, shape.heads, shape.tokens, HEAD, dtype=dtype)
    constants = (gdn_constants.planes(), gdn_constants.pair_masks())
    kernel = _kernel("gdn_prefill_nki", "gdn_prefill")
    options = {"scale": HEAD**-0.5, "checkpoint_chunks": CHECKPOINT_CHUNKS}
    return launch(kernel, q, q, value, -0.2 * gates, gates, *constants, **options)


def _gdn_decode(shape: Shape, dtype: torch.dtype) -> Launch:
    q = _unit(1, shape.batch, shape.heads, HEAD, dtype=dtype)
    gates = torch.rand(1, shape.batch, shape.heads, generator=torch.Generator().manual_seed(0))
    states = _normal(shape.batch, HEAD, shape.heads, HEAD)
    slots = torch.arange(shape.batch, dtype=torch.int32)
    kernel = _kernel("gdn_decode_nki", "gdn_decode")
    return launch(kernel, q, q, q, -gates, gates, states, slots, torch.eye(HEAD), scale=HEAD**-0.5)


def _causal_conv(shape: Shape, dtype: torch.dtype) -> Launch:
    channels = 3 * HEAD * shape.heads
    x, state = _normal(shape.batch, channels, shape.tokens, dtype=dtype), _normal(shape.batch, channels, 3, dtype=dtype)
    kernel = _kernel("causal_conv_nki", "causal_conv_prefill")
    return launch(kernel, x, _normal(channels, 4), state, checkpoint_tokens=256)


def _attention_prefill(shape: Shape, dtype: torch.dtype) -> Launch:
    """One key head, nothing before the chunk but one empty page."""
    q = _normal(shape.tokens, shape.heads, ATTENTION_HEAD, dtype=dtype)
    kv = _normal(shape.tokens, 1, ATTENTION_HEAD, dtype=dtype)
    pages, where = torch.zeros(1, 1, PAGE, ATTENTION_HEAD, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    kernel = _kernel("attention_d256_nki", "attention_prefill")
    return launch(kernel, q, kv, kv, pages, pages, where, where[None], gate=q, scale=ATTENTION_HEAD**-0.5)


def _attention_decode(shape: Shape, dtype: torch.dtype) -> Launch:
    """One key head, `tokens` cached tokens per sequence."""
    blocks = -(-shape.tokens // PAGE)
    pages = _normal(shape.batch * blocks, 1, PAGE, ATTENTION_HEAD, dtype=dtype)
    tables = torch.arange(shape.batch * blocks, dtype=torch.int32).view(shape.batch, blocks)
    lengths = torch.full((shape.batch, 1), shape.tokens, dtype=torch.int32)
    q = _normal(shape.batch, shape.heads, ATTENTION_HEAD, dtype=dtype)
    kernel = _kernel("attention_d256_nki", "attention_decode")
    return launch(kernel, q, pages, pages, tables, lengths, gate=q, scale=ATTENTION_HEAD**-0.5)


def _rmsnorm(shape: Shape, dtype: torch.dtype) -> Launch:
    x = _normal(shape.batch * shape.tokens, HIDDEN, dtype=dtype)
    return launch(_kernel("rmsnorm_nki", "rmsnorm"), x, torch.ones(HIDDEN))


def _qk_norm_rope(shape: Shape, dtype: torch.dtype) -> Launch:
    rows = shape.batch * shape.tokens
    x, table = _normal(rows, shape.heads, ATTENTION_HEAD, dtype=dtype), _normal(rows, 32)
    return launch(_kernel("qk_norm_rope_nki", "qk_norm_rope"), x, torch.zeros(ATTENTION_HEAD), table.cos(), table.sin())


def _router_topk(shape: Shape, _dtype: torch.dtype) -> Launch:
    return launch(_kernel("router_topk_nki", "router_topk"), _normal(shape.batch * shape.tokens, EXPERTS), CHOSEN)


_CASES: dict[str, Case] = {
    "gdn_prefill": _gdn_prefill,
    "gdn_decode": _gdn_decode,
    "causal_conv": _causal_conv,
    "attention_prefill": _attention_prefill,
    "attention_decode": _attention_decode,
    "rmsnorm": _rmsnorm,
    "qk_norm_rope": _qk_norm_rope,
    "router_topk": _router_topk,
}


def _state_bytes(shape: Shape, _dtype: torch.dtype) -> int:
    """Every state is read and written once."""
    return 2 * 4 * shape.batch * shape.heads * HEAD * HEAD


def _cache_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Every cached key and value is read once."""
    return 2 * dtype.itemsize * shape.batch * shape.tokens * ATTENTION_HEAD


_FLOOR_BYTES: dict[str, Callable[[Shape, torch.dtype], int]] = {
    "gdn_decode": _state_bytes,
    "attention_decode": _cache_bytes,
}
