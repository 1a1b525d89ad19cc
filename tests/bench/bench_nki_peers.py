"""Estimates our GDN prefill beside published kernels, in one run of the simulator. Nothing of theirs is kept here.

    python tests/bench/bench_nki_peers.py --nki-library NKI_LIBRARY/src/nkilib_src --nxdi-kernel nki_deltanet_fused.py

The first is a checkout of https://github.com/aws-neuron/nki-library (2.33: `nkilib.experimental.gdn.gdn_cte`), the
second a file of https://github.com/aws-neuron/neuronx-distributed-inference (contrib/models/Qwen3.5-2B).
Everything printed is an estimate of a simulator.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from warmstate.kernels import gdn_constants
from warmstate.kernels.gated_delta_torch import recurrence
from warmstate.kernels.nki_sim.install import installed
from warmstate.kernels.nki_sim.launch import Launch, launch
from warmstate.kernels.nki_sim.schedule import Estimate, estimate, profile
from warmstate.kernels.norm_torch import l2_norm_

HEAD = 128
SCALE = HEAD**-0.5
Run = Callable[["Inputs"], tuple[Launch, torch.Tensor]]


class Inputs:
    """One head: q, k (normalised), v [S, 128] bfloat16, g, beta [S] float32; zero state."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.q, self.k = (l2_norm_(torch.randn(length, HEAD, generator=generator)).to(torch.bfloat16) for _ in range(2))
        self.v = torch.randn(length, HEAD, generator=generator).to(torch.bfloat16)
        self.g = -0.2 * torch.rand(length, generator=generator)
        self.beta = torch.rand(length, generator=generator)

    def truth(self) -> torch.Tensor:
        q, k, v = (x.float()[:, None] for x in (self.q, self.k, self.v))
        return recurrence(q * SCALE, k, v, self.g[:, None], self.beta[:, None], torch.zeros(1, HEAD, HEAD))[0][:, 0]


def ours() -> Run:
    with installed():
        kernel = importlib.import_module("warmstate.kernels.gdn_prefill_nki").gdn_prefill
    constants = (gdn_constants.planes(), gdn_constants.pair_masks())

    def run(x: Inputs) -> tuple[Launch, torch.Tensor]:
        heads = [t[None, None] for t in (x.q, x.k, x.v, x.g, x.beta)]
        made = launch(kernel, *heads, *constants, scale=SCALE, checkpoint_chunks=2)
        return made, made.outputs[0][0, 0]

    return run


def schur(source: Path) -> Run:
    sys.path.insert(0, str(source))
    with installed():
        module = importlib.import_module("nkilib.experimental.gdn.gdn_cte")
        utils = importlib.import_module("nkilib.experimental.gdn.gdn_cte_utils")
    masks = torch.from_numpy(utils.build_mask_pack())

    def run(x: Inputs) -> tuple[Launch, torch.Tensor]:
        heads = [t[None, None] for t in (x.q, x.k, x.v, x.g, x.beta)]
        made = launch(module.gdn_cte, *heads, scale=SCALE, mask_pack=masks)
        return made, made.outputs[0][0, 0]

    return run


def merged(path: Path) -> Run:
    spec = importlib.util.spec_from_file_location("nxdi_deltanet_fused", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with installed():
        spec.loader.exec_module(module)
    ones = torch.ones(HEAD, HEAD)

    def run(x: Inputs) -> tuple[Launch, torch.Tensor]:
        tokens = [t.float() for t in (x.q, x.k, x.v)] + [x.g[:, None], x.beta[:, None]]
        masks = (ones.tril(-1), torch.eye(HEAD), ones.tril())
        made = launch(module.deltanet_fused_chunked_fwd, *tokens, torch.zeros(HEAD, HEAD), *masks)
        return made, made.outputs[0]

    return run


def _row(name: str, length: int, made: Estimate, error: float, base: Estimate | None) -> str:
    one, two = made.makespan_us
    row = f"{length:>6} {name:<34}{one:>9.1f}{two:>9.1f}{error:>10.1e}"
    if base is not None:
        row += f"{base.makespan_us[0] / one:>9.2f}{base.makespan_us[1] / two:>7.2f}"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nki-library", type=Path, help="src/nkilib_src of a checkout of nki-library")
    parser.add_argument("--nxdi-kernel", type=Path, help="nki_deltanet_fused.py of NxD Inference")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--profile", action="store_true", help="also print the busiest instructions of ours")
    options = parser.parse_args()
    torch.set_num_threads(1)
    peers: list[tuple[str, Run]] = []
    if options.nki_library is not None:
        peers.append(("AWS gdn_cte schur, bf16", schur(options.nki_library)))
    if options.nxdi_kernel is not None:
        peers.append(("NxD Inference fused, fp32 only", merged(options.nxdi_kernel)))
    run = ours()
    print("ESTIMATES of a simulator: one trn2 core, one head, microseconds under the 1N and 2N rule, ours / theirs")
    print(f"{'S':>6} {'kernel':<34}{'1N':>9}{'2N':>9}{'error':>10}{'ratio 1N':>9}{'2N':>7}")
    for length in options.lengths:
        x = Inputs(length)
        expected = x.truth()
        made, out = run(x)
        base = estimate(made.traces)
        print(_row("ours, bf16, checkpoint every 256", length, base, _error(out, expected), None), flush=True)
        for name, peer in peers:
            theirs, their_out = peer(x)
            print(_row(name, length, estimate(theirs.traces), _error(their_out, expected), base), flush=True)
        if options.profile:
            for entry in profile(made.traces[0], 1)[:8]:
                print("       ", *entry)
    return 0


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    sys.exit(main())
