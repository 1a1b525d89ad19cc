"""Times puts and gets of one checkpoint against a raw socket that moves the same bytes over loopback.

Run: python tests/bench/bench_store.py [--megabytes 19.5] [--rounds 10]
Prints medians in milliseconds and the rate relative to the raw socket (checksums on); asserts nothing.
"""

import argparse
import asyncio
import os
import socket
import statistics
import threading
import time
from collections.abc import Awaitable

import numpy as np

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Hit, Part, PartSpec, Stored


def time_raw_socket(data: memoryview, num_rounds: int) -> float:
    """Median milliseconds to `sendall` the bytes and `recv_into` a buffer at the other end, one process."""
    target = memoryview(bytearray(len(data)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        with sender, receiver:
            return statistics.median(_raw_round(sender, receiver, data, target) for _ in range(num_rounds))


def _raw_round(sender: socket.socket, receiver: socket.socket, data: memoryview, target: memoryview) -> float:
    started = time.perf_counter()
    thread = threading.Thread(target=sender.sendall, args=(data,))
    thread.start()
    num_read = 0
    while num_read < len(target):
        num_read += receiver.recv_into(target[num_read:])
    thread.join()
    return 1000 * (time.perf_counter() - started)


async def time_store(store: RedisStore, data: memoryview, kind: str, num_rounds: int) -> tuple[float, float]:
    """Median milliseconds of a put and of a get of these bytes as one part."""
    spec = PartSpec("kv" if kind == "kv" else "rec", "uint8", (len(data),))
    into = {spec.name: Part(spec, memoryview(bytearray(len(data))))}
    puts, gets = [], []
    for _ in range(num_rounds):
        key = ObjectKey("kv" if kind == "kv" else "ck", bytes(32), os.urandom(32), 64)
        puts.append(await _timed(store.put(key, {spec.name: Part(spec, data)}), Stored))
        gets.append(await _timed(store.get(key, into), Hit))
        await store.delete(key)
    return statistics.median(puts), statistics.median(gets)


async def _timed(call: Awaitable[object], expected: type) -> float:
    started = time.perf_counter()
    outcome = await call
    if not isinstance(outcome, expected):
        raise SystemExit(f"the store answered {outcome}")
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=19.5)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    data = np.random.default_rng(0).integers(0, 256, int(arguments.megabytes * 1e6), dtype=np.uint8).data
    raw_ms = time_raw_socket(data, arguments.rounds)
    print(f"{arguments.megabytes} MB, median of {arguments.rounds}: raw socket {raw_ms:.1f} ms")
    with EmbeddedServer(max_memory_bytes=2 << 30) as server:
        for kind in ("ck", "kv"):
            put_ms, get_ms = asyncio.run(_time_kind(server, data, kind, arguments.rounds))
            print(
                f"{kind}: put {put_ms:.1f} ms ({raw_ms / put_ms:.2f}x raw), "
                f"get {get_ms:.1f} ms ({raw_ms / get_ms:.2f}x raw)"
            )


async def _time_kind(server: EmbeddedServer, data: memoryview, kind: str, num_rounds: int) -> tuple[float, float]:
    store = RedisStore(server.address)
    try:
        return await time_store(store, data, kind, num_rounds)
    finally:
        await store.close()


if __name__ == "__main__":
    main()
