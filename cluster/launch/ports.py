"""Owns the question whether a TCP port is free, and who has it."""

import errno
import socket

import psutil

from warmstate.cluster.launch.launch_errors import ConfigError, PortInUse


def check_port_free(host: str, port: int) -> None:
    """Raises `PortInUse` naming the holder, or `ConfigError` when `host` is no address of this machine."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"http.host {host!r} is not an address: {error}") from error
    with socket.socket(address[0], socket.SOCK_STREAM) as probe:
        # A server that has just stopped leaves connections in TIME_WAIT; those are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError as error:
            raise ConfigError(f"http.port {port} needs privileges; use --port to choose one above 1023") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"http.host {host!r} is no address of this machine") from error
            raise PortInUse(f"port {port} of {host} is in use{_holder(port)}; use --port to choose another") from error


def _holder(port: int) -> str:
    try:
        listeners = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return ""
    for listener in listeners:
        if listener.status != psutil.CONN_LISTEN or listener.pid is None or not listener.laddr:
            continue
        if listener.laddr.port == port:
            return f" by pid {listener.pid} ({_name(listener.pid)})"
    return ""


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "unknown"


def find_free_ports(count: int) -> list[int]:
    """Free loopback ports, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
