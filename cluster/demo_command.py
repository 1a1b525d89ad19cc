"""`warmstate demo-model`: writes a seeded checkpoint of real architecture and file format. Knows no Ray."""

import argparse
from pathlib import Path

from warmstate.cluster.launch.launch_errors import ConfigError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("demo-model", help="write a small model with random weights to try things with")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; must not hold a checkpoint yet")
    parser.add_argument("--family", default="qwen3_5_text", help="architecture (default: %(default)s)")
    parser.add_argument("--size", default="tiny", help="shape (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="(default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    from warmstate.models.demo import demo_checkpoint

    families, sizes = sorted(demo_checkpoint.FAMILIES), sorted(demo_checkpoint.SIZES)
    _check_choice("--family", options.family, families)
    _check_choice("--size", options.size, sizes)
    if (options.directory / "config.json").exists():
        raise ConfigError(f"{options.directory} holds a checkpoint already; name another directory")
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    demo_checkpoint.write_demo_checkpoint(
        options.directory, family=options.family, size=options.size, dtype=dtype, seed=options.seed
    )
    print(f"wrote {options.directory}; serve it with: warmstate serve {options.directory}")
    return 0


def _check_choice(option: str, value: str, choices: list[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{option} {value}: choose one of {', '.join(choices)}")
