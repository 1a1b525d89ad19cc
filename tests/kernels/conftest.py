"""One thread unless a test asks for more: the tensors are tiny, and more threads only wait for each other."""

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmstate.kernels.nki_sim import install


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Nki:
    """Runs NKI kernels: through `nki.simulate` where AWS's nki is installed, else in our simulator."""

    def __init__(self) -> None:
        with install.real_or_simulated():
            self._simulate = importlib.import_module("nki").simulate

    def kernel(self, module: str, name: str) -> Any:
        """The kernel `name` of `warmstate.kernels.<module>`, as a function of (*arguments, lnc=1, **keywords)."""
        with install.real_or_simulated():
            kernel = getattr(importlib.import_module(f"warmstate.kernels.{module}"), name)

        def run(*arguments: Any, lnc: int = 1, **keywords: Any) -> Any:
            return self._simulate(kernel[lnc])(*arguments, **keywords)

        return run


@pytest.fixture(scope="session")
def nki() -> Nki:
    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    return Nki()
