"""Times what keeping and publishing a checkpoint costs the engine thread, at the sizes of the 0.8B shape.

Run: python tests/bench/bench_publish.py [--rounds 10] [--tokens 64 2048 8192 32768]
Prints, for prefixes of so many tokens of which nothing is kept yet, medians of the milliseconds of one plain copy of
the state, of `CheckpointKeeper.keep` as the engine's step pays for it (the checkpoint is copied beside the steps, then
kept in the host tier and published), of the same with all copying inside the step, and of a stand-in for the next step
alone and beside the copying and publishing. Asserts nothing.
"""

import argparse
import asyncio
import os
import queue
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import BLOCK_TOKENS, chain_root, prefix_keys
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cluster.launch.process_heap import keep_freed_memory
from warmstate.models.backend import ModelBackend, SequenceState, StateShapes
from warmstate.models.kv_pool import KvPool
from warmstate.replicas.cache.copying import Copier, CopyNow, CopyThread
from warmstate.replicas.cache.host_tier import HostTier
from warmstate.replicas.cache.keeper import CheckpointKeeper
from warmstate.replicas.cache.state_codec import CheckpointNames, state_bytes
from warmstate.replicas.cache.store_link import StoreDirectory, StoreLink
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.messages import CheckpointKind, GenerateRequest, SamplingParams
from warmstate.replicas.sequence import Sequence as EngineSequence
from warmstate.replicas.service import SWITCH_INTERVAL_S

NUM_FILLING = 4
"""Rounds until the host tiers are full, as they are in a replica that has served for a while: memory is used again."""

SHAPES = StateShapes(18, 16, 16, 128, 128, 4, 6, 2, 256, torch.bfloat16)


class NoDirectory:
    """Tells nobody."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def new_sequence(num_tokens: int) -> EngineSequence:
    """A prompt of its own, so that nothing of it is kept yet."""
    tokens = np.frombuffer(os.urandom(4 * (num_tokens + 1)), dtype=np.uint32).astype(np.int32) & 0xFFFF
    root = chain_root()
    keys = b"".join(prefix_keys(tokens.astype(np.uint32), root))
    return EngineSequence(GenerateRequest("bench", tokens, SamplingParams(max_tokens=1), root, keys), 0, 1 << 17)


class Pool:
    """The part of a backend that keeping needs: shapes, and the KV of a real pool."""

    def __init__(self, num_tokens: int) -> None:
        self.shapes = SHAPES
        self.blocks = BlockPool(num_tokens // BLOCK_TOKENS + 1)
        self._kv = KvPool(SHAPES, num_tokens // BLOCK_TOKENS + 1)
        self._kv.pages.fill_(0.5)

    def read_kv(self, blocks: Sequence[int], start: int, stop: int, out: torch.Tensor) -> None:
        self._kv.read(blocks, start, stop, out)


class Inbox:
    """Where the engine thread, here the main one, finds work that others post."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def run_until(self, idle: Callable[[], bool]) -> None:
        while not idle():
            self._queue.get()()


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 2048, 8192, 32768])
    options = parser.parse_args()
    torch.set_num_threads(1)
    # As in a replica.
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    for num_tokens in options.tokens:
        measure(num_tokens, options.rounds, loop)
    loop.call_soon_threadsafe(loop.stop)


def measure(num_tokens: int, num_rounds: int, loop: asyncio.AbstractEventLoop) -> None:
    """Prints the row of one length."""
    state = SequenceState(num_tokens, torch.randn(SHAPES.rec_shape()), torch.randn(SHAPES.conv_shape()).bfloat16())
    matrix, pool, inbox, copies = torch.randn(512, 512), Pool(num_tokens), Inbox(), CopyThread()
    with EmbeddedServer(max_memory_bytes=2 << 30) as server:
        store = RedisStore(server.address)
        names = CheckpointNames(bytes(32), SHAPES.num_head_groups)
        link = StoreLink(store, cast(StoreDirectory, NoDirectory()), names, loop, lambda _: 10.0)

        def new_keeper(copier: Copier, linked: StoreLink | None) -> CheckpointKeeper:
            host = HostTier(SHAPES, names, 5 * state_bytes(SHAPES, num_tokens) // 2, lambda *_: None)
            backend = cast(ModelBackend, pool)
            return CheckpointKeeper(backend, pool.blocks, host, names, linked, CacheConfig(), copier, inbox.post)

        beside, inside = new_keeper(copies, link), new_keeper(CopyNow(), None)
        took: dict[str, list[float]] = defaultdict(list)
        for number in range(NUM_FILLING + num_rounds):
            if number == NUM_FILLING:
                took.clear()
            sequence = new_sequence(num_tokens)
            sequence.block_table = pool.blocks.take_free(num_tokens // BLOCK_TOKENS)
            took["step alone"].append(timed(lambda: step(matrix)))
            took["copy"].append(timed(lambda: (state.rec.clone(), state.conv.clone())))
            took["all inside"].append(timed(partial(inside.keep, sequence, state, CheckpointKind.END)))
            took["keep"].append(timed(partial(beside.keep, sequence, state, CheckpointKind.END)))
            took["step beside"].append(timed(lambda: step(matrix)))
            inbox.run_until(lambda: beside.is_idle)
            asyncio.run_coroutine_threadsafe(link.drain(), loop).result()
            pool.blocks.release(sequence.block_table)
        published = link.stats()["published"]
        asyncio.run_coroutine_threadsafe(store.close(), loop).result()
    copies.close()
    shown = ", ".join(f"{name} {statistics.median(values):.2f} ms" for name, values in took.items())
    beyond = statistics.median(differences(took["keep"], took["copy"]))
    print(
        f"{num_tokens:6} tokens: {shown}; keep beyond one copy {beyond:+.2f} ms; published {published:.0f}", flush=True
    )


def step(matrix: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        matrix = torch.tanh(matrix @ matrix)
    return matrix


def differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(left, right, strict=True)]


if __name__ == "__main__":
    main()
