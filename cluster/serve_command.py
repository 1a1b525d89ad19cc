"""`warmstate serve`: starts a private Ray with the application, shows the way up, and takes all of it down again."""

import argparse
import os
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmstate.cluster.config import merge, parse_config, read_config_file
from warmstate.cluster.launch.interrupts import killed_by_interrupts, raise_on_signals
from warmstate.cluster.launch.launch_errors import ConfigError
from warmstate.cluster.launch.logs import LOG_FILE_NAME, LOG_FILE_VARIABLE, LogFollower, set_up_logging
from warmstate.cluster.launch.ports import check_port_free
from warmstate.cluster.launch.process_tree import die_with_parent
from warmstate.cluster.launch.progress import Progress
from warmstate.cluster.launch.supervisor import DIRECTORY_VARIABLE, supervise

if TYPE_CHECKING:
    from warmstate.cluster.config import AppConfig
    from warmstate.cluster.launch.launch_plan import LaunchPlan


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("serve", help="serve a model over an OpenAI-compatible API")
    parser.add_argument("model", nargs="?", metavar="PATH_OR_HF_ID", help="checkpoint directory or Hugging Face id")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file; options given here win over it")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 8000)")
    parser.add_argument("--replicas", type=int, help="copies of the model (default: 2)")
    parser.add_argument("--dtype", help="auto, float32 (deterministic) or bfloat16 (default: auto)")
    parser.add_argument("--deterministic", action="store_true", default=None, help="deterministic mode for bfloat16")
    parser.add_argument(
        "--max-model-len", type=int, help="longest sequence, in tokens (default: the model's, at most 65536)"
    )
    parser.add_argument("--max-sequences", type=int, help="sequences that run at once in a replica (default: 16)")
    parser.add_argument(
        "--served-model-name", help="name of the model in the API (default: the directory's, or the id)"
    )
    parser.add_argument("--redis-url", help="use this server as the shared store; password in WARMSTATE_REDIS_PASSWORD")
    parser.add_argument("--no-store", action="store_true", help="share nothing between replicas")
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        help="what is shown here and written to Serve's logs; debug has the choice between fetching and computing each "
        "prefix, with what decided it (default: info)",
    )
    parser.add_argument("--dashboard", action="store_true", help="start Ray's dashboard too")
    # Set by the supervisor for its child.
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def config_values(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration as the file and the options give it, unvalidated; options win."""
    values = read_config_file(options.config) if options.config else {}
    store: Mapping[str, Any] = {}
    if options.no_store and options.redis_url is not None:
        raise ConfigError("--no-store and --redis-url contradict each other; give one of them")
    if options.no_store:
        store = {"kind": "none"}
    elif options.redis_url is not None:
        store = {"kind": "redis", "url": options.redis_url}
    merged = merge(
        values,
        {
            "model": {
                "path": options.model,
                "served_name": options.served_model_name,
                "dtype": options.dtype,
                "deterministic": options.deterministic,
            },
            "engine": {"max_model_len": options.max_model_len, "max_sequences": options.max_sequences},
            "store": store,
            "http": {"host": options.host, "port": options.port},
            "replicas": options.replicas,
            "log_level": options.log_level,
        },
    )
    if isinstance(merged["model"], Mapping) and "path" not in merged["model"]:
        raise ConfigError("name a model: warmstate serve PATH_OR_HF_ID (or model.path in the --config file)")
    return merged


def run(options: argparse.Namespace) -> int:
    """Runs the server in a child, so that nothing of it can remain."""
    if options.supervised:
        with killed_by_interrupts():
            return serve(options)
    return supervise([*options.command_line, "--supervised"])


def serve(options: argparse.Namespace) -> int:
    """Everything that can be wrong is found before the first process starts."""
    die_with_parent()
    config = parse_config(config_values(options))
    check_port_free(config.http.host, config.http.port)
    progress = Progress()
    with ExitStack() as stack:
        if (directory := os.environ.get(DIRECTORY_VARIABLE)) is not None:
            log_file = Path(directory, LOG_FILE_NAME)
            os.environ[LOG_FILE_VARIABLE] = str(log_file)
            stack.enter_context(LogFollower(log_file, progress.note))
        set_up_logging(config.log_level, "serve")
        return _plan_and_serve(config, progress, options.dashboard)


def _plan_and_serve(config: "AppConfig", progress: Progress, dashboard: bool) -> int:
    progress.show("checking the model")
    from warmstate.cluster.launch.launch_plan import check_memory, plan_launch

    plan = plan_launch(config)
    check_memory(plan)
    return _serve(plan, progress, dashboard)


def _serve(plan: "LaunchPlan", progress: Progress, dashboard: bool) -> int:
    from warmstate.cluster.launch.local_ray import LocalRay

    http = plan.config.http
    directory = Path(os.environ.get(DIRECTORY_VARIABLE) or tempfile.mkdtemp(prefix="warmstate-", dir="/tmp"))
    progress.show("starting Ray")
    try:
        with LocalRay(directory, http.host, http.port, dashboard=dashboard) as local:
            # Imports Serve, which reads the environment that LocalRay has set.
            from warmstate.cluster.application import Application

            progress.show("starting the application")
            application = Application(plan)
            application.deploy()
            application.wait_until_ready(progress)
            progress.end()
            raise_on_signals()
            print(_greeting(plan, local.log_directory), flush=True)
            try:
                threading.Event().wait()
            finally:
                progress.mute()
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        progress.end()
    return 0


def _greeting(plan: "LaunchPlan", log_directory: Path) -> str:
    url = plan.config.http.url
    return f"""ready: {url}/v1  ({plan.config.replicas} replicas of {plan.card.served_name})
logs: {log_directory}
try:
  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d \\
    '{{"model": "{plan.card.served_name}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""
