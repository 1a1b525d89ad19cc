"""What users reported of NKI itself, which our simulator refuses, and of convolutions, asked of ours.

Each docstring names the report, as in https://github.com/<owner>/<repo>/issues/<number>.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from warmstate.kernels.nki_sim import install
from warmstate.kernels.nki_sim.errors import ConstraintViolation

CARRY = 3


@pytest.fixture
def api() -> Iterator[Any]:
    """nki, nl and nisa as a kernel imports them from our simulator."""
    if install.has_real_nki():
        pytest.skip("the real nki is installed: this asks our simulator")
    with install.installed():
        names = {"nki": "nki", "nl": "nki.language", "nisa": "nki.isa"}
        yield SimpleNamespace(**{short: importlib.import_module(name) for short, name in names.items()})


def _ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def test_a_bias_that_a_copy_would_drop_is_refused(api: Any) -> None:
    """aws-neuron/aws-neuron-sdk #1296: activation(op=nl.copy) ignores its bias on the device."""
    nl, nisa = api.nl, api.nisa

    def kernel(x: Any, bias: float) -> Any:
        out, tile = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm), nl.load(x)
        nisa.activation(tile, nl.copy, tile, bias=bias, scale=2.0)
        nl.store(out, tile)
        return out

    np.testing.assert_array_equal(api.nki.simulate(api.nki.jit(kernel))(_ones(4, 8), 0.0), 2 * _ones(4, 8))
    with pytest.raises(ConstraintViolation, match="activation-copy-bias"):
        api.nki.simulate(api.nki.jit(kernel))(_ones(4, 8), 1.0)


@pytest.mark.parametrize("narrow", [(4, 1, 8), (4, 5, 1), (4, 8)])
def test_an_implicit_broadcast_is_refused_and_an_explicit_one_is_right(api: Any, narrow: tuple[int, ...]) -> None:
    """aws-neuron/aws-neuron-sdk #1138: a broadcast that was right in AWS's simulator was wrong on the device."""
    nl, nisa = api.nl, api.nisa

    def kernel(x: Any, y: Any, explicit: bool) -> Any:
        out, left, right = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm), nl.load(x), nl.load(y)
        if explicit:
            right = right if len(narrow) == 3 else right.expand_dim(1)
            right = nl.broadcast_to(right, x.shape)
        nisa.tensor_tensor(left, left, right, nl.multiply)
        nl.store(out, left)
        return out

    x, y = (
        np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in ((0, (4, 5, 8)), (1, narrow))
    )
    run = api.nki.simulate(api.nki.jit(kernel))
    np.testing.assert_array_equal(run(x, y, True), x * y.reshape(narrow if len(narrow) == 3 else (4, 1, 8)))
    with pytest.raises(ConstraintViolation, match="same-elements"):
        run(x, y, False)


@pytest.mark.parametrize("on_chip", [False, True])
def test_a_copy_at_a_run_time_address_is_the_copy_at_that_address(api: Any, on_chip: bool) -> None:
    """aws-neuron/aws-neuron-sdk #1373: dma_copy with a dynamic access pattern crashed where a static one worked."""
    nl, nisa = api.nl, api.nisa

    def kernel(table: Any, where: Any, dynamic: bool) -> Any:
        out = nl.ndarray((4, 2), table.dtype, buffer=nl.shared_hbm)
        source, tile = nl.load(table) if on_chip else table, nl.ndarray((4, 2), table.dtype)
        index = nl.load(where)
        view = source.ap([[16, 4], [1, 2]], scalar_offset=index, indirect_dim=1) if dynamic else source[:, 5:7]
        nisa.dma_copy(tile, view)
        nl.store(out, tile)
        return out

    table = np.arange(64, dtype=np.float32).reshape(4, 16)
    run = api.nki.simulate(api.nki.jit(kernel))
    at = [run(table, np.array([[5]], np.int32), dynamic) for dynamic in (True, False)]
    np.testing.assert_array_equal(at[0], table[:, 5:7])
    np.testing.assert_array_equal(at[0], at[1])
    for outside in (16, -1):
        with pytest.raises(ConstraintViolation, match="dma-bounds"):
            run(table, np.array([[outside]], np.int32), True)


def test_an_output_that_a_kernel_never_wrote_is_an_error_and_no_zeros(api: Any) -> None:
    """aws-neuron/nki-samples #134: four kernels for the old harness returned all zeros on NKI 0.6, and exit code 0."""
    nl = api.nl

    def silent(x: Any) -> Any:
        return nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)

    with pytest.raises(ConstraintViolation, match="output-written"):
        api.nki.simulate(api.nki.jit(silent))(_ones(4, 8))


def test_the_calls_of_the_old_harness_are_errors(api: Any) -> None:
    """aws-neuron/nki-samples #134: results as return values, masks, and outputs that were arguments."""
    nl, nisa = api.nl, api.nisa

    def returned(x: Any) -> Any:
        return nisa.nc_transpose(nl.load(x))

    def masked(x: Any) -> Any:
        return nl.load(x, mask=None)

    def assigned(x: Any) -> Any:
        tile = nl.load(x)
        tile[0:2, 0:2] = 0.0
        return x

    for kernel, error in ((returned, TypeError), (masked, TypeError), (assigned, ConstraintViolation)):
        with pytest.raises(error):
            api.nki.simulate(api.nki.jit(kernel))(_ones(4, 8))


def test_the_old_namespace_cannot_be_imported_by_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """aws-neuron/nki-samples #134: `neuronxcc.nki` was still importable, and ran kernels that wrote nothing."""
    (tmp_path / "neuronxcc" / "nki").mkdir(parents=True)
    for package in ("neuronxcc", "neuronxcc/nki"):
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("neuronxcc", "neuronxcc.nki"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    old = importlib.import_module("neuronxcc.nki")
    with install.installed(), pytest.raises(ImportError):
        importlib.import_module("neuronxcc.nki")
    assert sys.modules["neuronxcc.nki"] is old


def _conv(nki: Any, name: str) -> Callable[..., Any]:
    run: Callable[..., Any] = nki.kernel("causal_conv_nki", name)
    return run


def _tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((batch, 16, length), (16, CARRY + 1), (batch, 16, CARRY))
    x, taps, state = (torch.randn(*shape, generator=generator) for shape in shapes)
    return x, taps, state


@pytest.mark.parametrize("valid", [0, 1, 2, 3, 25, 40])
def test_the_convolution_state_is_not_taken_from_right_padding(nki: Any, valid: int) -> None:
    """sophgo/LLM-TPU #150: the state of the convolution was the last inputs of the padded row."""
    x, taps, state = _tokens(1, 40)
    lengths = torch.tensor([[valid]], dtype=torch.int32)
    _, after = _conv(nki, "causal_conv_prefill")(x, taps, state, valid_len=lengths)
    assert torch.equal(after, torch.cat((state, x[:, :, :valid]), dim=2)[:, :, -CARRY:])


@pytest.mark.parametrize("pad", [1, 3, 64])
def test_padding_before_a_prompt_does_not_bleed_through_the_convolution(nki: Any, pad: int) -> None:
    """AI-Hypercomputer/maxtext #5295: left padding went through the convolution into the state.

    Prompts start at their first token here, on a zeroed state: the taps before it must see zeros, and nothing of a
    neighbour or of memory.
    """
    x, taps, _ = _tokens(2, 70)
    fresh = torch.zeros(2, 16, CARRY)
    run = _conv(nki, "causal_conv_prefill")
    out, after = run(x, taps, fresh)
    padded, padded_after = run(torch.cat((torch.zeros(2, 16, pad), x), dim=2), taps, fresh)
    assert torch.equal(padded[:, :, pad:], out)
    assert torch.equal(padded_after, after)
    alone, _ = run(x[1:2].contiguous(), taps, fresh[1:2])
    assert torch.equal(out[1:2], alone)
