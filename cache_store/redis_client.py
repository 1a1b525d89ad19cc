"""Owns how this package connects to a Redis-protocol server and how its errors read. Knows no object, row or event."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from warmstate.cache_store.errors import StoreUnavailable
from warmstate.cache_store.store import DropReason, MissReason

_READ_BYTES = 1 << 18
_COPY_BELOW_BYTES = 6000


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM form for a `rediss://` server: the authority that signed its certificate (None: the system's), and
    the certificate and key of ours for a server that asks for them. The server's name is always verified."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the server is, as whom to log in, and how long to wait for it. `repr` never shows the password."""

    url: str
    password: str | None = None
    connect_timeout_s: float = 0.25
    operation_timeout_s: float = 2.0
    username: str | None = None
    tls: TlsFiles = TlsFiles()
    min_bytes_per_s: int = 50_000_000

    def __repr__(self) -> str:
        return f"StoreAddress({self.location})"

    def timeout_s(self, num_bytes: int = 0) -> float:
        """Seconds that an operation which moves this many bytes may take: a slow network is not a broken server."""
        return self.operation_timeout_s + num_bytes / self.min_bytes_per_s

    @property
    def location(self) -> str:
        """The URL without credentials, for messages."""
        scheme, _, rest = self.url.rpartition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"


def open_client(address: StoreAddress, max_connections: int, timeout_s: float | None = None) -> redis.Redis:
    """A client that connects when first used. It never retries, so that a call lasts no longer than its timeout; it
    speaks RESP2, whose replies have one form in every server and client version; it returns bytes.

    `timeout_s` replaces the operation timeout, for commands that block on purpose.
    """
    try:
        pool = redis.BlockingConnectionPool.from_url(
            address.url,
            max_connections=max_connections,
            timeout=address.operation_timeout_s,
            username=address.username,
            password=address.password,
            socket_connect_timeout=address.connect_timeout_s,
            socket_timeout=timeout_s or address.operation_timeout_s,
            socket_read_size=_READ_BYTES,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            decode_responses=False,
            # hiredis would copy every memoryview that it packs; this one hands them to the socket.
            command_packer=PythonRespSerializer(_COPY_BELOW_BYTES, _encode),
            **_tls_options(address),
        )
    except ValueError as error:
        raise StoreUnavailable(f"store URL {address.location} is not usable: {error}") from error
    return redis.Redis.from_pool(pool)


def _tls_options(address: StoreAddress) -> dict[str, str | None]:
    """What only a TLS connection understands; there the certificate and the name of the server are verified."""
    if not address.url.startswith("rediss://"):
        return {}
    tls = address.tls
    return {"ssl_ca_certs": tls.ca_file, "ssl_certfile": tls.cert_file, "ssl_keyfile": tls.key_file}


def _encode(value: bytes | memoryview | str | int) -> bytes | memoryview:
    return value if isinstance(value, bytes | memoryview) else str(value).encode()


@contextmanager
def translated_errors(address: StoreAddress) -> Iterator[None]:
    """Turns what the client raises into `StoreUnavailable`."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        raise StoreUnavailable(f"store at {address.location}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call to the server gave no answer, in the words of both directions."""

    miss_reason: MissReason
    drop_reason: DropReason
    counts_for_breaker: bool
    detail: str


def failure_of(error: Exception) -> Failure:
    """Sorts an error. A server that answers in time, even with a refusal of this one command, is not broken."""
    detail = f"{type(error).__name__}: {error}"
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return Failure(MissReason.TIMEOUT, DropReason.TIMEOUT, True, detail)
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return Failure(MissReason.UNAVAILABLE, DropReason.NO_ROOM, False, detail)
    is_answer = isinstance(error, redis.ResponseError) and not isinstance(error, redis.ReadOnlyError)
    return Failure(MissReason.UNAVAILABLE, DropReason.UNAVAILABLE, not is_answer, detail)
