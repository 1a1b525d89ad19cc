"""Owns standing in for `nki`: only where the real one is absent, and only while asked for by name."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from warmstate.kernels.nki_sim import isa, language
from warmstate.kernels.nki_sim.errors import SimulatorError
from warmstate.kernels.nki_sim.launch import Kernel, jit, simulate

NAMES = ("nki", "nki.isa", "nki.language", "nki.typing")
OLD_NAMESPACE = "neuronxcc"
"""What kernels imported before NKI 0.3: `neuronxcc.nki` in a kernel is an error since 0.4 (NOTES 2.30)."""


def has_real_nki() -> bool:
    """Whether AWS's own nki is importable (the package of that name on PyPI is empty)."""
    if isinstance(sys.modules.get("nki"), _SimulatedModule):
        return False
    spec = importlib.util.find_spec("nki")
    if spec is None or spec.submodule_search_locations is None:
        return False
    return importlib.util.find_spec("nki.isa") is not None


@contextmanager
def installed() -> Iterator[None]:
    """Within this block `import nki` gives the simulator, and the old namespace cannot be imported.

    Modules imported in it keep what they got.
    """
    if has_real_nki():
        raise SimulatorError("the real nki is installed: use nki.simulate of that, not the simulator")
    old = [name for name in sys.modules if name.split(".")[0] == OLD_NAMESPACE]
    held = {name: sys.modules.pop(name, None) for name in {*NAMES, OLD_NAMESPACE, *old}}
    blocked: dict[str, Any] = {OLD_NAMESPACE: None}
    sys.modules.update(_modules() | blocked)
    try:
        yield
    finally:
        for name, module in held.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


@contextmanager
def real_or_simulated() -> Iterator[None]:
    """Within this block `import nki` gives the real one where it is installed, else the simulator."""
    if has_real_nki():
        yield
        return
    with installed():
        yield


class Tensor:
    """`nki.typing.tensor`: an annotation, `tensor[128, 512]`; the shape is not checked."""

    def __class_getitem__(cls, _shape: Any) -> "type[Tensor]":
        return cls


class _SimulatedModule(ModuleType):
    """Marks the stand-ins."""


def _modules() -> dict[str, ModuleType]:
    nki, nki_isa, nki_language, nki_typing = (_SimulatedModule(name, f"The simulator's {name}.") for name in NAMES)
    nki_isa.__dict__.update(isa.namespace())
    nki_language.__dict__.update(language.namespace())
    nki_typing.__dict__["tensor"] = Tensor
    modules = (nki, nki_isa, nki_language, nki_typing)
    nki.__dict__.update({name.removeprefix("nki."): module for name, module in zip(NAMES, modules, strict=True)})
    nki.__dict__.update({"jit": jit, "simulate": simulate, "Kernel": Kernel, "__path__": []})
    return dict(zip(NAMES, modules, strict=True))
