"""`warmstate demo-model`: writes a seeded checkpoint of real architecture and file format. Knows no Ray."""

import argparse
from pathlib import Path

from warmstate.cluster.launch.launch_errors import ConfigError

# Said again here, and held to `demo_checkpoint` by a test, because importing that takes seconds.
FAMILIES = ("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", "qwen3_next")
SIZES = ("tiny", "small", "0.8b", "1.2b")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("demo-model", help="write a small model with random weights to try things with")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; must be empty or not exist yet")
    parser.add_argument("--family", default=FAMILIES[0], choices=FAMILIES, help="architecture (default: %(default)s)")
    parser.add_argument("--size", default=SIZES[0], choices=SIZES, help="shape (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="(default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint

    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    try:
        write_demo_checkpoint(
            options.directory, family=options.family, size=options.size, dtype=dtype, seed=options.seed
        )
    except OSError as error:
        raise ConfigError(f"{options.directory}: {error.strerror or error}") from error
    print(f"wrote {options.directory}; serve it with: warmstate serve {options.directory}")
    return 0
