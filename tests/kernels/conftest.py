"""Runs NKI kernels, the GDN prefill beside its truth, and gives tests a row for every pair of values of two factors.

One thread unless a test asks for more: the tensors are tiny, and more threads only wait for each other.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
import torch

from warmstate.kernels import gdn_constants
from warmstate.kernels.gated_delta_torch import recurrence
from warmstate.kernels.nki_sim import install

Pair = tuple[str, Any, str, Any]
Row = dict[str, Any]


def covering(factors: dict[str, Sequence[Any]]) -> list[Row]:
    """Rows of one value per factor; any value of one factor meets any value of another in some row.

    Greedy: a row starts from a pair that is still missing, and each further factor takes the value that settles most
    missing pairs with those chosen before. The same factors always give the same rows.
    """
    order = sorted(factors, key=lambda name: -len(factors[name]))
    missing = _pairs(factors)
    rows: list[Row] = []
    while missing:
        first, value, second, other = next(iter(missing))
        row: Row = {first: value, second: other}
        for name in order:
            if name in row:
                continue
            turned = [factors[name][(i + len(rows)) % len(factors[name])] for i in range(len(factors[name]))]
            row[name] = max(turned, key=lambda v: sum(pair in missing for pair in _pairs_of({**row, name: v})))
        missing = {pair: None for pair in missing if pair not in set(_pairs_of(row))}
        rows.append({name: row[name] for name in factors})
    return rows


def uncovered(factors: dict[str, Sequence[Any]], rows: list[Row]) -> list[Pair]:
    """The pairs of values that no row has."""
    found = {pair for row in rows for pair in _pairs_of(row)}
    return [pair for pair in _pairs(factors) if pair not in found]


def _pairs(factors: dict[str, Sequence[Any]]) -> dict[Pair, None]:
    names = sorted(factors)
    return {(a, x, b, y): None for a, b in combinations(names, 2) for x in factors[a] for y in factors[b]}


def _pairs_of(row: Row) -> list[Pair]:
    return [(a, row[a], b, row[b]) for a, b in combinations(sorted(row), 2)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """@pytest.mark.pairwise(length=(1, 2), dtype=(...)) runs a test once for each row of the covering design."""
    marker = metafunc.definition.get_closest_marker("pairwise")
    if marker is None:
        return
    factors = dict(marker.kwargs)
    rows = covering(factors)
    assert not uncovered(factors, rows)
    names = list(factors)
    labels = ["-".join(f"{name}={str(row[name]).replace(' ', '')}" for name in names) for row in rows]
    metafunc.parametrize(names, [tuple(row[name] for name in names) for row in rows], ids=labels)


@pytest.fixture(scope="session")
def design() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`covering` and `uncovered`."""
    return covering, uncovered


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


@dataclass(frozen=True)
class GdnInputs:
    """q, k [B, Hk, S, dk], normalised; v [B, Hv, S, dv]; g, beta [B, Hv, S]; state [B, Hv, dk, dv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor

    def to(self, dtype: torch.dtype) -> "GdnInputs":
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def tokens(self, first: int, last: int) -> "GdnInputs":
        cut = {name: getattr(self, name)[:, :, first:last].contiguous() for name in ("q", "k", "v", "g", "beta")}
        return replace(self, **cut)

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All sequences and heads at once, in float64: the recurrence sees B * Hv independent heads."""
        ratio = self.v.shape[1] // self.k.shape[1]
        q, k = (t.double().repeat_interleave(ratio, dim=1).flatten(0, 1).transpose(0, 1) for t in (self.q, self.k))
        v, g, beta = (t.double().flatten(0, 1).transpose(0, 1) for t in (self.v, self.g, self.beta))
        out, state = recurrence(q * q.shape[-1] ** -0.5, k, v, g, beta, self.state.double().flatten(0, 1))
        return out.transpose(0, 1).reshape(self.v.shape), state.reshape(self.state.shape)


class GdnPrefill:
    """The prefill kernel with states [.., dk, dv] in and out; (out, state), and the checkpoints if there are any."""

    inputs = GdnInputs

    def __init__(self, nki: Nki) -> None:
        self._kernel = nki.kernel("gdn_prefill_nki", "gdn_prefill")
        self._constants = (gdn_constants.planes(), gdn_constants.pair_masks())

    def __call__(self, x: GdnInputs, **keywords: Any) -> Any:
        keywords.setdefault("initial_state", x.state.transpose(1, 2).contiguous())
        keywords.setdefault("scale", x.q.shape[-1] ** -0.5)
        out, final, *checkpoints = self._kernel(x.q, x.k, x.v, x.g, x.beta, *self._constants, **keywords)
        return (out, final.transpose(1, 2), *(c.permute(0, 3, 1, 2, 4) for c in checkpoints))


@pytest.fixture(scope="session")
def prefill(nki: Nki) -> GdnPrefill:
    return GdnPrefill(nki)
