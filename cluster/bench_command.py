"""`warmstate bench nki`: prints what the simulator estimates of the NKI kernels. Knows no Ray and no device."""

import argparse
from typing import TYPE_CHECKING

from warmstate.cluster.launch.launch_errors import ConfigError

if TYPE_CHECKING:
    from warmstate.kernels.nki_bench import Bench

HEADER = f"{'kernel':<18}{'makespan us':>16}{'PE':>9}{'Vector':>14}{'Scalar':>8}{'GpSimd':>8}{'PE %':>10}"
HEADER += f"{'instr':>8}{'DMA MiB':>9}{'SBUF KiB':>9}{'PSUM KiB':>9}{'/ bytes':>12}{'/ chain':>12}"
PATH_ROWS = 8


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("bench", help="estimate the kernels for Trainium in the simulator")
    benches = parser.add_subparsers(title="benches", required=True, metavar="BENCH")
    nki = benches.add_parser("nki", help="estimates of the NKI kernels on one trn2 core, by a simulator on this CPU")
    nki.add_argument("--kernel", help="one kernel (default: all)")
    nki.add_argument("--tokens", type=_positive, default=2048, help="tokens per sequence (default: %(default)s)")
    nki.add_argument("--batch", type=_positive, default=1, help="sequences (default: %(default)s)")
    nki.add_argument("--heads", type=_positive, default=1, help="value or query heads (default: %(default)s)")
    nki.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="(default: %(default)s)")
    nki.add_argument("--profile", action="store_true", help="what engines do, and what the longest chain is made of")
    nki.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    from warmstate.kernels.nki_bench import Shape, bench, kernel_names
    from warmstate.kernels.nki_sim.errors import SimulatorError

    names = kernel_names()
    if options.kernel is not None and options.kernel not in names:
        raise ConfigError(f"--kernel {options.kernel}: expected one of {', '.join(names)}")
    shape = Shape(options.tokens, options.batch, options.heads)
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    print(f"ESTIMATES of a simulator for one trn2 core, not measurements: {shape}, {options.dtype}.")
    print("Pairs are its two rules for instructions with two inputs: 1N and 2N cycles.")
    print("/ bytes: over the time of the bytes that must move; / chain: over that and two DMA latencies.")
    print(HEADER)
    for name in names if options.kernel is None else (options.kernel,):
        try:
            made = bench(name, shape, dtype)
        except SimulatorError as error:
            raise ConfigError(f"{name} at {shape}: {error}") from error
        print(_row(made), flush=True)
        if options.profile:
            print("\n".join(_profile(made)), flush=True)
    return 0


def _row(made: "Bench") -> str:
    estimate = made.estimate
    spans, busy = estimate.makespan_us, estimate.busy_us
    shares = [100 * busy["tensor"][rule] / spans[rule] for rule in (0, 1)]
    row = f"{made.kernel:<18}{_pair(spans):>16}{busy['tensor'][0]:>9.1f}{_pair(busy['vector']):>14}"
    row += f"{busy['scalar'][0]:>8.1f}{busy['gpsimd'][0]:>8.1f}{shares[0]:>5.0f}/{shares[1]:<4.0f}"
    row += f"{sum(estimate.counts.values()):>8}{estimate.dma_bytes / 2**20:>9.2f}"
    row += f"{estimate.sbuf_peak_bytes / 1024:>9.1f}{estimate.psum_peak_bytes / 1024:>9.1f}"
    for floor_us in () if made.floor is None else (made.floor.bytes_us, made.floor.chain_us):
        row += f"{spans[0] / floor_us:>7.2f}/{spans[1] / floor_us:<4.2f}"
    return row


def _profile(made: "Bench") -> list[str]:
    """By the 2N rule: how long each engine is busy, what it does most, and the chain that ends last."""
    from warmstate.kernels.nki_sim.schedule import critical_path, profile

    span = made.estimate.makespan_us[1]
    busy = {name: pair[1] for name, pair in made.estimate.busy_us.items() if pair[1]}
    lines = ["  busy, 2N: " + ", ".join(f"{name} {_share(us, span)}" for name, us in busy.items())]
    rows = profile(made.estimate.trace, 1)
    lines += [f"  {'work' if i == 0 else '':<13}{_line(row, span)}" for i, row in enumerate(rows[:PATH_ROWS])]
    rows = critical_path(made.estimate.trace, 1)
    lines += [f"  {'longest chain' if i == 0 else '':<13}{_line(row, span)}" for i, row in enumerate(rows[:PATH_ROWS])]
    latency = sum(us for engine, what, _, us in rows if engine.startswith("dma") and what == "latency")
    return [*lines, f"  DMA latency on the chain: {_share(latency, span)}"]


def _line(row: tuple[str, str, int, float], span: float) -> str:
    engine, what, count, us = row
    return f" {engine + ' ' + what:<52}{count:>5} x {_share(us, span)}"


def _share(us: float, span: float) -> str:
    return f"{us:.2f} us ({100 * us / span:.0f} %)"


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.1f}/{values[1]:.1f}"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
