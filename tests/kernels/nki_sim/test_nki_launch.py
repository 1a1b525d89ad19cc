"""Launching, standing in for nki, and the estimate: what depends on what, and the documented peak."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from warmstate.kernels.nki_sim import cost_constants, install, isa, language
from warmstate.kernels.nki_sim.errors import SimulatorError
from warmstate.kernels.nki_sim.launch import Kernel, jit, launch
from warmstate.kernels.nki_sim.schedule import estimate, profile

nl: Any = SimpleNamespace(**language.namespace())
nisa: Any = SimpleNamespace(**isa.namespace())


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_tensors_come_back_as_such_and_each_core_has_a_trace(cores: int, dtype: torch.dtype) -> None:
    def copied(x: Any) -> Any:
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = launch(Kernel(copied)[cores], x)
    assert torch.equal(made.outputs, x)
    assert len(made.traces) == cores


def test_a_bfloat16_argument_that_is_no_block_of_memory_is_updated_too() -> None:
    def kernel(state: Any) -> Any:
        nl.store(state, nl.zeros((4, 2), "bfloat16"))
        return state

    held = torch.ones(4, 4, dtype=torch.bfloat16)
    assert torch.equal(Kernel(kernel)(held[:, ::2]), torch.zeros(4, 2, dtype=torch.bfloat16))
    assert held[:, ::2].eq(0).all()
    assert held[:, 1::2].eq(1).all()


def test_the_simulator_stands_in_only_within_its_block() -> None:
    assert not install.has_real_nki(), "with the real nki these tests are to run through nki.simulate"
    with install.installed():
        assert importlib.import_module("nki.isa").nc_matmul is nisa.nc_matmul
    assert "nki" not in sys.modules
    with pytest.raises(ImportError):
        importlib.import_module("nki")


def test_the_module_of_annotations_is_there_too() -> None:
    with install.installed():
        typing = importlib.import_module("nki.typing")
        assert importlib.import_module("nki").typing is typing

    def kernel(x: typing.tensor[4, 4]) -> Any:  # type: ignore[name-defined]
        return x

    np.testing.assert_array_equal(Kernel(kernel)(np.ones((4, 4), np.float32)), np.ones((4, 4)))


def test_the_simulator_does_not_replace_the_real_nki(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "has_real_nki", lambda: True)
    with pytest.raises(SimulatorError), install.installed():
        pass


def _chain(length: int, dependent: bool) -> float:
    def kernel(_x: Any) -> None:
        tiles = [nl.zeros((128, 512), "float32") for _ in range(length + 1)]
        for i in range(length):
            nisa.activation(tiles[i + 1] if dependent else nl.ndarray((128, 512), "float32"), nl.exp, tiles[i])

    made = launch(Kernel(kernel), np.zeros((1, 1), np.float32))
    return estimate(made.traces).makespan_us[0] - estimate(made.traces).busy_us["gpsimd"][0]


def test_what_depends_waits_and_what_does_not_overlaps() -> None:
    latency = cost_constants.ENGINE_LATENCY_CYCLES / cost_constants.SCALAR_GHZ / 1e3
    assert _chain(8, True) > _chain(8, False) + 6 * latency


def _two_engines(same_tile: bool) -> float:
    def kernel(_x: Any) -> None:
        a, b = nl.zeros((128, 4096), "float32"), nl.ndarray((128, 4096), "float32")
        nisa.memset(b, 0.0, engine=nisa.engine.vector)
        nisa.activation(a, nl.exp, a)
        nisa.tensor_scalar(a if same_tile else b, a if same_tile else b, nl.multiply, 2.0)

    return estimate(launch(Kernel(kernel), np.zeros((1, 1), np.float32)).traces).makespan_us[0]


def test_engines_run_side_by_side_on_different_tiles() -> None:
    assert _two_engines(False) < _two_engines(True) - 2.0


def test_parts_of_one_tile_are_independent() -> None:
    def span(second: slice) -> float:
        def kernel(_x: Any) -> None:
            tile = nl.zeros((128, 8192), "float32")
            nisa.activation(tile[:, 0:4096], nl.exp, tile[:, 0:4096])
            nisa.tensor_scalar(tile[:, second], tile[:, second], nl.multiply, 2.0)

        return estimate(launch(Kernel(kernel), np.zeros((1, 1), np.float32)).traces).makespan_us[0]

    assert span(slice(4096, 8192)) < span(slice(0, 4096)) - 2.0


@jit
def tiled_matmul(left: Any, right: Any) -> Any:
    """left [K, M], right [K, N] -> left.T @ right, all tiles resident."""
    contraction, rows = left.shape
    out = nl.ndarray((rows, right.shape[1]), left.dtype, buffer=nl.shared_hbm)
    tiles = [(nl.load(left[nl.ds(k, 128), :]), nl.load(right[nl.ds(k, 128), :])) for k in range(0, contraction, 128)]
    for m in range(0, rows, 128):
        for n in range(0, right.shape[1], 512):
            total = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
            for stationary, moving in tiles:
                nisa.nc_matmul(total, stationary[:, nl.ds(m, 128)], moving[:, nl.ds(n, 512)])
            result = nl.ndarray((128, 512), left.dtype)
            nisa.tensor_copy(result, total)
            nl.store(out[nl.ds(m, 128), nl.ds(n, 512)], result)
    return out


@pytest.mark.parametrize(("dtype", "tflops"), [(torch.bfloat16, 79.0), (torch.float32, 20.0)])
def test_a_tiled_matmul_is_estimated_at_the_documented_peak(dtype: torch.dtype, tflops: float) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 1024, generator=generator).to(dtype) for _ in range(2))
    made = launch(tiled_matmul, left, right)
    expected = left.float().T @ right.float()
    assert ((made.outputs.float() - expected).abs().max() / expected.abs().max()).item() < 5e-3
    flops = 2 * 512 * 1024 * 1024
    assert flops / estimate(made.traces).busy_us["tensor"][0] / 1e6 == pytest.approx(tflops, rel=0.03)
    assert profile(made.traces[0], 0)[0][0] == "tensor"
