"""Times puts and gets of checkpoints against a raw socket that moves the same bytes over loopback, checksums on.

Run: python tests/bench/bench_store.py [--megabytes 19.5 77 154] [--rounds 7]
Checkpoints are cut into four head groups that travel at once, as a replica's do. Every round measures all of it, and
the rates are medians of what the rounds gave relative to their own raw socket. Then: how long a small read of the
index takes beside such traffic, on the same server and on one of its own. Asserts nothing.
"""

import argparse
import asyncio
import os
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Sequence

import numpy as np

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.redis_client import StoreAddress, open_client
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Hit, Part, PartSpec, Stored

NUM_GROUPS = 4
NUM_SMALL_READS = 1500


class RawSocket:
    """`sendall` at one end, `recv_into` a buffer at the other, in one process: the most that loopback gives."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._target = memoryview(bytearray(len(data)))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._sender = socket.create_connection(listener.getsockname())
            self._receiver, _ = listener.accept()

    def time_ms(self) -> float:
        started = time.perf_counter()
        thread = threading.Thread(target=self._sender.sendall, args=(self._data,))
        thread.start()
        num_read = 0
        while num_read < len(self._target):
            num_read += self._receiver.recv_into(self._target[num_read:])
        thread.join()
        return 1000 * (time.perf_counter() - started)

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


class Checkpoint:
    """The bytes as one part per head group, and buffers to read them into."""

    def __init__(self, data: memoryview, kind: str) -> None:
        self._kind = kind
        share = len(data) // NUM_GROUPS
        spec = PartSpec("kv" if kind == "kv" else "rec", "uint8", (share,))
        cuts = [data[group * share : (group + 1) * share] for group in range(NUM_GROUPS)]
        self._parts = [{spec.name: Part(spec, cut)} for cut in cuts]
        self._into = [{spec.name: Part(spec, memoryview(bytearray(share)))} for _ in cuts]

    async def time_ms(self, store: RedisStore) -> tuple[float, float]:
        """Milliseconds of a put and of a get."""
        keys = [ObjectKey("kv" if self._kind == "kv" else "ck", bytes(32), os.urandom(32), 64) for _ in self._parts]
        puts = [store.put(key, parts) for key, parts in zip(keys, self._parts, strict=True)]
        put_ms = await _timed(puts, Stored)
        get_ms = await _timed([store.get(key, into) for key, into in zip(keys, self._into, strict=True)], Hit)
        for key in keys:
            await store.delete(key)
        return put_ms, get_ms


async def _timed(calls: Sequence[Awaitable[object]], expected: type) -> float:
    started = time.perf_counter()
    outcomes = await asyncio.gather(*calls)
    took_ms = 1000 * (time.perf_counter() - started)
    if not all(isinstance(outcome, expected) for outcome in outcomes):
        raise SystemExit(f"the store answered {outcomes}")
    return took_ms


async def print_rates(address: StoreAddress, megabytes: float, num_rounds: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, int(megabytes * 1e6), dtype=np.uint8).data
    raw, store = RawSocket(data), RedisStore(address)
    checkpoints = {kind: Checkpoint(data, kind) for kind in ("ck", "kv")}
    raw_ms: list[float] = []
    rates: dict[str, list[float]] = {f"{what} {kind}": [] for kind in checkpoints for what in ("put", "get")}
    for number in range(num_rounds + 1):
        before_ms = raw.time_ms()
        for kind, checkpoint in checkpoints.items():
            put_ms, get_ms = await checkpoint.time_ms(store)
            if number:
                rates[f"put {kind}"].append(before_ms / put_ms)
                rates[f"get {kind}"].append(before_ms / get_ms)
        raw_ms.append(before_ms)
    raw.close()
    await store.close()
    shown = ", ".join(f"{name} {statistics.median(values):.2f}x" for name, values in rates.items())
    print(f"{megabytes:6.1f} MB, raw socket {statistics.median(raw_ms[1:]):6.1f} ms: {shown}", flush=True)


async def print_index_latency(name: str, index: StoreAddress, payload: StoreAddress, has_traffic: bool) -> None:
    """Percentiles of small reads by one client, with a checkpoint of 19.5 MB always on its way to or fro."""
    data = np.zeros(19_500_000, dtype=np.uint8).data
    store, checkpoint = RedisStore(payload), Checkpoint(data, "ck")
    reads = asyncio.create_task(asyncio.to_thread(_time_small_reads, index))
    while has_traffic and not reads.done():
        await checkpoint.time_ms(store)
    took_ms = sorted(await reads)
    await store.close()
    p50, p99 = (took_ms[int(len(took_ms) * share)] for share in (0.5, 0.99))
    print(f"index reads {name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms", flush=True)


def _time_small_reads(address: StoreAddress) -> list[float]:
    client = open_client(address, max_connections=1)
    client.hset("bench", "row", b"x" * 64)
    took_ms = []
    for _ in range(NUM_SMALL_READS):
        started = time.perf_counter()
        client.hget("bench", "row")
        took_ms.append(1000 * (time.perf_counter() - started))
        time.sleep(0.001)
    client.close()
    return took_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[19.5, 77, 154])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with EmbeddedServer(max_memory_bytes=2 << 30) as server, EmbeddedServer() as other:
        for megabytes in arguments.megabytes:
            asyncio.run(print_rates(server.address, megabytes, arguments.rounds))
        asyncio.run(print_index_latency("alone", server.address, server.address, False))
        asyncio.run(print_index_latency("beside payload, same server", server.address, server.address, True))
        asyncio.run(print_index_latency("beside payload, own server", other.address, server.address, True))


if __name__ == "__main__":
    main()
