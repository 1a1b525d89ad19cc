"""Owns the accidents: replicas, the store and its keeper killed outright, at random times."""

import random
import threading
import time
from collections import Counter

import psutil

from warmstate.tests.soak.soaked_server import NUM_REPLICAS, SoakedServer

REPLICA = "ray::ServeReplica:warmstate:replica"
_VICTIMS = {"replica": REPLICA, "store": "valkey-server", "keeper": "ray::ServeReplica:warmstate:store"}
_WEIGHTS = (5, 4, 1)


class Destroyer:
    """Kills every few seconds while its context is open. One replica at a time: the other can finish what was begun."""

    def __init__(self, server: SoakedServer, seed: int, pause_s: tuple[float, float]) -> None:
        self.num_killed: Counter[str] = Counter()
        self._server = server
        self._rng = random.Random(seed)
        self._pause_s = pause_s
        self._spared: psutil.Process | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Destroyer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def spare_one(self) -> psutil.Process:
        """From now on one replica lives, so that its memory can be watched."""
        self._server.wait_until_ready()
        self._spared = self._server.processes(REPLICA)[0]
        return self._spared

    def _run(self) -> None:
        while not self._stop.wait(self._rng.uniform(*self._pause_s)):
            (kind,) = self._rng.choices(list(_VICTIMS), _WEIGHTS)
            if kind == "replica" and self._server.num_ready() < NUM_REPLICAS:
                continue
            victims = [process for process in self._server.processes(_VICTIMS[kind]) if process != self._spared]
            if victims:
                self._rng.choice(victims).kill()
                self.num_killed[kind] += 1


def wait_until_whole(server: SoakedServer) -> None:
    """Waits for whatever was killed last to come back."""
    while not all(server.processes(title) for title in _VICTIMS.values()):
        time.sleep(0.5)
    server.wait_until_ready()
