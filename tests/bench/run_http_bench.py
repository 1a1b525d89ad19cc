"""Serves, in one Ray Serve until SIGINT, warmstate at / and the bare echo at /echo.

Arguments: PATH PORT MODEL. MODEL is `null` (the model computes nothing) or `real` (the checkpoint at PATH).
"""

import contextlib
import sys
import tempfile
import threading
from pathlib import Path

from warmstate.cluster.config import parse_config
from warmstate.cluster.launch.launch_plan import plan_launch
from warmstate.cluster.launch.local_ray import LocalRay

sys.path.insert(0, str(Path(__file__).resolve().parent))

path, port, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
config = parse_config({"model": {"path": path, "served_name": "bench"}, "http": {"port": port}, "replicas": 2})
with tempfile.TemporaryDirectory(prefix="warmstate-") as directory, LocalRay(Path(directory), "127.0.0.1", port):
    # All of these import Serve, which reads the environment that LocalRay has set.
    from null_replica import NullReplica  # type: ignore[import-not-found]  # beside this script
    from ray import serve
    from serve_echo import build as build_echo  # type: ignore[import-not-found]  # beside this script

    from warmstate.cluster.app import build_application
    from warmstate.cluster.replica_deployment import ReplicaDeployment

    replica_class = NullReplica if model == "null" else ReplicaDeployment
    serve.run_many(
        [
            serve.RunTarget(build_application(plan_launch(config), replica_class), name="bench", route_prefix="/"),
            serve.RunTarget(build_echo({}), name="echo", route_prefix="/echo"),
        ]
    )
    print("ready", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
