"""The `warmstate` command. Each subcommand is a module with `add_parser`, and imports heavy things when it runs.

This module itself imports next to nothing: until `main` runs, Ctrl-C is a traceback.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from warmstate.cluster.launch.interrupts import killed_by_interrupts
from warmstate.cluster.launch.launch_errors import LaunchError
from warmstate.models.errors import ModelError

if TYPE_CHECKING:
    import argparse

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; errors that the user can put right are one message on stderr, never a traceback."""
    command_line = sys.argv[1:] if arguments is None else list(arguments)
    with killed_by_interrupts():
        options = build_parser().parse_args(command_line)
        options.command_line = command_line
    try:
        code: int = options.run(options)
    except LaunchError as error:
        return _fail(error, error.exit_code)
    except ModelError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def build_parser() -> "argparse.ArgumentParser":
    import argparse
    import importlib.metadata

    from warmstate.cluster import bench_command, cache_command, demo_command, serve_command

    parser = argparse.ArgumentParser(
        prog="warmstate", description="Serve Qwen hybrid models (Gated DeltaNet + GQA) with every replica warm."
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("warmstate"))
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve_command.add_parser(commands)
    demo_command.add_parser(commands)
    cache_command.add_parser(commands)
    bench_command.add_parser(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_print_version)
    return parser


def _print_version(_options: "argparse.Namespace") -> int:
    import importlib.metadata

    print(importlib.metadata.version("warmstate"))
    return 0


def _fail(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
