"""The store over TLS: with the right authority it works, and with anything less it is unavailable, never unverified."""

import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warmstate.cache_store.codec import CHUNK_BYTES
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.redis_client import StoreAddress, TlsFiles
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Dropped, DropReason, Hit, Miss, MissReason, Part, Stored

Run = Callable[[Awaitable[Any]], Any]
MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
EmptyLike = Callable[[dict[str, Part]], dict[str, Part]]
Eventually = Callable[[Callable[[], bool]], None]
Try = Callable[[StoreAddress], tuple[Any, Any]]

UNAVAILABLE = (MissReason.UNAVAILABLE, DropReason.UNAVAILABLE)
_NEW_KEY = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@pytest.fixture(scope="module")
def tls_binary() -> str:
    """A server that may have TLS; the embedded one has none."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    return binary or pytest.skip("neither redis-server nor valkey-server on PATH")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, and a certificate of 127.0.0.1 and one of a client, both signed by the first."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ca", "stranger"):
        openssl(folder, *_NEW_KEY, "-x509", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    for name, subject in (("server", "IP:127.0.0.1"), ("client", "DNS:replica")):
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-x509", "-addext", f"subjectAltName={subject}")
        extensions = ("-addext", "basicConstraints=critical,CA:false")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl(folder, *_NEW_KEY, *signed, *extensions, "-subj", f"/CN={name}", *files)
    return folder


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)


@pytest.fixture(params=["no", "yes"], ids=["any client", "known clients"])
def tls_port(
    request: pytest.FixtureRequest, tls_binary: str, certificates: Path, eventually: Eventually
) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    files = [f"--tls-{name}-file" for name in ("cert", "key", "ca-cert")]
    named = zip(files, ("server.pem", "server.key", "ca.pem"), strict=True)
    command = [tls_binary, "--port", "0", "--tls-port", str(port), "--save", "", "--bind", "127.0.0.1"]
    command += [argument for pair in named for argument in pair]
    command += ["--tls-auth-clients", request.param, "--requirepass", "secret"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=certificates) as process:
        try:
            eventually(lambda: process.poll() is not None or is_open(port))
            if process.poll() is not None:
                pytest.skip(f"{tls_binary} has no TLS")
            yield port
        finally:
            process.terminate()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def reach(run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike) -> Try:
    """What a put and a get of two chunks give at this address: both results, or both reasons."""

    def attempt(address: StoreAddress) -> tuple[Any, Any]:
        store, key, parts = RedisStore(address), make_key(), make_parts(rec=("uint8", (CHUNK_BYTES + 5,)))
        into = empty_like(parts)
        put, get = run(store.put(key, parts)), run(store.get(key, into))
        run(store.close())
        if isinstance(get, Hit):
            assert bytes(into["rec"].data) == bytes(parts["rec"].data)
        return (
            get.reason if isinstance(get, Miss) else type(get),
            put.reason if isinstance(put, Dropped) else type(put),
        )

    return attempt


def test_only_the_right_authority_name_and_client_reach_the_store(
    request: pytest.FixtureRequest, tls_port: int, certificates: Path, reach: Try
) -> None:
    authority, stranger, client, key = (
        str(certificates / name) for name in ("ca.pem", "stranger.pem", "client.pem", "client.key")
    )
    asks_for_clients = "known clients" in request.node.name

    def at(tls: TlsFiles, host: str = "127.0.0.1", scheme: str = "rediss") -> StoreAddress:
        return StoreAddress(f"{scheme}://{host}:{tls_port}/0", "secret", connect_timeout_s=2.0, tls=tls)

    whole = (Hit, Stored)
    assert reach(at(TlsFiles(authority, client, key))) == whole
    assert reach(at(TlsFiles(authority))) == (UNAVAILABLE if asks_for_clients else whole)
    assert reach(at(TlsFiles(stranger, client, key))) == UNAVAILABLE
    assert reach(at(TlsFiles(None, client, key))) == UNAVAILABLE
    assert reach(at(TlsFiles(authority, client, key), host="localhost")) == UNAVAILABLE
    assert reach(at(TlsFiles(authority, client, key), scheme="redis")) == UNAVAILABLE


def test_a_wrong_password_over_tls_is_unavailable(tls_port: int, certificates: Path, reach: Try) -> None:
    tls = TlsFiles(*(str(certificates / name) for name in ("ca.pem", "client.pem", "client.key")))
    address = StoreAddress(f"rediss://127.0.0.1:{tls_port}/0", "wrong", connect_timeout_s=2.0, tls=tls)
    assert reach(address) == UNAVAILABLE
