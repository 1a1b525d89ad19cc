"""Keeps Serve's replicas of one machine out of reach of others. To be called in a replica's constructor."""

from collections.abc import Callable
from typing import Any

import ray
from ray.serve._private import replica as serve_replica

_LOOPBACK = "127.0.0.1"


def stay_on_loopback() -> None:
    """Where Ray itself listens on the loopback interface alone, Serve's port for calls between deployments does too.

    Serve has no setting for it: it binds all interfaces, and unpickles what comes, whoever sent it. It binds after
    the constructor has returned.
    """
    bind = serve_replica.add_port_to_grpc_server
    if ray.util.get_node_ip_address() == _LOOPBACK and not isinstance(bind, _OnLoopback):
        serve_replica.add_port_to_grpc_server = _OnLoopback(bind)


class _OnLoopback:
    def __init__(self, bind: Callable[[Any, str], int]) -> None:
        self._bind = bind

    def __call__(self, server: Any, address: str) -> int:
        return self._bind(server, f"{_LOOPBACK}:{address.rpartition(':')[2]}")
