"""The transfer of payload by itself: replies cut anywhere, sizes that lie, and buffers taken back in the middle."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from redis.exceptions import InvalidResponse, OutOfMemoryError

from warmstate.cache_store.errors import LoanEnded
from warmstate.cache_store.loan import Loan
from warmstate.cache_store.payload_stream import MAX_SMALL_BYTES, PayloadStream

Pair = tuple[PayloadStream, socket.socket, Loan]


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    """A stream, and the server's end of its connection."""
    ends: list[socket.socket] = []

    def make(timeout_s: float = 10.0) -> Pair:
        ours, theirs = socket.socketpair()
        ends.extend((ours, theirs))
        ours.settimeout(0)
        loan = Loan()
        return PayloadStream(ours, loan, time.monotonic() + timeout_s), theirs, loan

    yield make
    for end in ends:
        end.close()


def test_a_command_arrives_with_its_buffers_in_order(pair: Callable[..., Pair]) -> None:
    stream, server, _ = pair()
    large = memoryview(bytes(range(256)) * 400)
    received = bytearray()

    def read() -> None:
        while not received.endswith(b"$2\r\nNX\r\n"):
            received.extend(server.recv(65536))

    thread = threading.Thread(target=read)
    thread.start()
    stream.send("SET", b"key", [memoryview(b"head"), large, memoryview(b"tail")], 7, "NX")
    thread.join()
    value = b"head" + bytes(large) + b"tail"
    expected = b"*5\r\n$3\r\nSET\r\n$3\r\nkey\r\n$%d\r\n%b\r\n$1\r\n7\r\n$2\r\nNX\r\n" % (len(value), value)
    assert bytes(received) == expected


def test_replies_come_whole_however_they_are_cut(pair: Callable[..., Pair]) -> None:
    value = bytes(range(200))
    raw = b"+OK\r\n:42\r\n$-1\r\n$200\r\n" + value + b"\r\n*3\r\n:1\r\n-OOM full\r\n$2\r\nab\r\n$0\r\n\r\n*-1\r\n"
    for cut in range(1, len(raw)):
        stream, server, _ = pair()
        for _ in range(7):
            stream.send("X")
        thread = threading.Thread(target=send_in_two, args=(server, raw, cut))
        thread.start()
        target = memoryview(bytearray(200))
        assert stream.read_value() == b"OK"
        assert stream.read_reply() == 42
        assert stream.read_into(target) is None
        assert stream.read_into(target) == 200
        assert bytes(target) == value
        one, error, text = stream.read_reply() or ()  # type: ignore[misc]
        assert (one, type(error), text) == (1, OutOfMemoryError, b"ab")
        assert stream.read_into(target) == 0
        assert stream.read_value() is None
        assert stream.is_idle
        thread.join()


def send_in_two(server: socket.socket, raw: bytes, cut: int) -> None:
    server.sendall(raw[:cut])
    server.sendall(raw[cut:])


@pytest.mark.parametrize(
    "reply",
    [
        b"$%d\r\n" % (MAX_SMALL_BYTES + 1),
        b"$99999999999999999999\r\n",
        b"*17\r\n",
        b"$-2\r\n",
        b"*-5\r\n",
        b"*1\r\n" * 5000,
        b"$abc\r\n",
        b":\r\n",
        b"?\r\n",
        b"\r\n",
        b"$2\r\nabXY",
        b"$2\r\nabc\r\n",
        b"+" + b"x" * 10_000,
    ],
    ids=lambda reply: repr(reply[:12]),
)
def test_a_reply_that_is_none_is_refused_before_anything_is_made_of_it(pair: Callable[..., Pair], reply: bytes) -> None:
    stream, server, _ = pair()
    stream.send("GET", "key")
    server.sendall(reply)
    with pytest.raises(InvalidResponse):
        stream.read_reply()
    assert not stream.is_idle


@pytest.mark.parametrize("size", [1, 9, 11, 10**15])
def test_a_value_of_another_size_is_not_read(pair: Callable[..., Pair], size: int) -> None:
    stream, server, _ = pair()
    target = memoryview(bytearray(b"\xa5" * 10))
    stream.send("HGET", "key", "field")
    server.sendall(b"$%d\r\n" % size + b"x" * min(size, 100))
    assert stream.read_into(target) == size
    assert bytes(target) == b"\xa5" * 10
    assert not stream.is_idle


def test_a_connection_that_ends_in_the_middle_is_an_error(pair: Callable[..., Pair]) -> None:
    raw = b"$20\r\n" + b"x" * 20 + b"\r\n"
    for cut in range(len(raw)):
        stream, server, _ = pair()
        stream.send("GET", "key")
        server.sendall(raw[:cut])
        server.shutdown(socket.SHUT_WR)
        with pytest.raises(redis.ConnectionError):
            stream.read_into(memoryview(bytearray(20)))


def test_nothing_is_written_to_buffers_that_were_taken_back_in_the_middle(pair: Callable[..., Pair]) -> None:
    stream, server, loan = pair()
    target = memoryview(bytearray(20))
    stream.send("GET", "key")
    server.sendall(b"$20\r\n" + b"x" * 10)
    raised: list[BaseException] = []

    def read() -> None:
        try:
            stream.read_into(target)
        except LoanEnded as error:
            raised.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while target[9] != ord("x"):
        time.sleep(0.001)
    loan.close()
    server.sendall(b"y" * 10 + b"\r\n")
    thread.join(10)
    assert len(raised) == 1
    assert bytes(target) == b"x" * 10 + bytes(10)


def test_a_server_that_reads_nothing_costs_the_deadline(pair: Callable[..., Pair]) -> None:
    stream, _, _ = pair(timeout_s=0.2)
    with pytest.raises(redis.TimeoutError):
        stream.send("SET", "key", [memoryview(bytes(64 << 20))])


def test_a_server_that_says_nothing_costs_the_deadline(pair: Callable[..., Pair]) -> None:
    stream, _, _ = pair(timeout_s=0.2)
    stream.send("GET", "key")
    with pytest.raises(redis.TimeoutError):
        stream.read_reply()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed", OutOfMemoryError),
        ("LOADING the dataset", redis.BusyLoadingError),
        ("READONLY a replica", redis.ReadOnlyError),
        ("NOAUTH log in", redis.AuthenticationError),
        ("WRONGTYPE another", redis.ResponseError),
        ("", redis.ResponseError),
    ],
)
def test_errors_are_those_of_the_client_library(
    pair: Callable[..., Pair], text: str, kind: type[redis.RedisError]
) -> None:
    stream, server, _ = pair()
    server.sendall(f"-{text}\r\n".encode() * 2)
    with pytest.raises(kind):
        stream.ask("DEL", "key")
    stream.send("GET", "key")
    with pytest.raises(kind):
        stream.read_into(memoryview(bytearray(3)))
    assert stream.is_idle
