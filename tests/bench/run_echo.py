"""Starts the echo application on the port given as the only argument, until SIGINT."""

import sys
import time
from pathlib import Path

import ray
from ray import serve

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serve_echo import build  # type: ignore[import-not-found]  # beside this script

ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(build({}), name="echo")
try:
    while True:
        time.sleep(1)
except KeyboardInterrupt:
    serve.shutdown()
    ray.shutdown()
