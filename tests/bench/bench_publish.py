"""Times what keeping and publishing a checkpoint costs the engine thread, at the sizes of the 0.8B shape.

Run: python tests/bench/bench_publish.py [--rounds 30]
Prints the milliseconds of one plain copy of the state, of `CheckpointKeeper.keep` (which copies, verifies, keeps in the
host tier, and starts to publish), and of a stand-in for the next step alone and beside the publishing. Asserts nothing.
"""

import argparse
import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import BLOCK_TOKENS, chain_root, prefix_keys
from warmstate.cache_store.redis_store import RedisStore
from warmstate.models.backend import ModelBackend, SequenceState, StateShapes
from warmstate.replicas.cache.host_tier import HostTier
from warmstate.replicas.cache.keeper import CheckpointKeeper
from warmstate.replicas.cache.state_codec import CheckpointNames
from warmstate.replicas.cache.store_directory import EventDirectory
from warmstate.replicas.cache.store_link import StoreLink
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.messages import CheckpointKind, GenerateRequest, SamplingParams
from warmstate.replicas.sequence import Sequence as EngineSequence

SHAPES = StateShapes(18, 16, 16, 128, 128, 4, 6, 2, 256, torch.bfloat16)


class NoDirectory:
    """Tells nobody."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def new_sequence() -> EngineSequence:
    """A prompt of its own, so that nothing of it is kept yet."""
    tokens = np.frombuffer(os.urandom(4 * (BLOCK_TOKENS + 1)), dtype=np.uint32).astype(np.int32) & 0xFFFF
    root = chain_root()
    keys = b"".join(prefix_keys(tokens.astype(np.uint32), root))
    return EngineSequence(GenerateRequest("bench", tokens, SamplingParams(max_tokens=1), root, keys), 0, 4096)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    num_rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    state = SequenceState(BLOCK_TOKENS, torch.randn(SHAPES.rec_shape()), torch.randn(SHAPES.conv_shape()).bfloat16())
    matrix = torch.randn(512, 512)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    with EmbeddedServer(max_memory_bytes=2 << 30) as server:
        store = RedisStore(server.address)
        names = CheckpointNames(bytes(32), SHAPES.num_head_groups)
        link = StoreLink(store, cast(EventDirectory, NoDirectory()), names, loop, lambda _: 10.0)
        host = HostTier(SHAPES, names, 1 << 30, lambda *_: None)
        backend = cast(ModelBackend, SimpleNamespace(shapes=SHAPES, read_kv=lambda *given: given[-1].zero_()))
        keeper = CheckpointKeeper(backend, host, names, link, CacheConfig())
        took: dict[str, list[float]] = {name: [] for name in ("copy", "keep", "step alone", "step beside")}
        for _ in range(num_rounds):
            sequence = new_sequence()
            took["step alone"].append(timed(lambda: step(matrix)))
            took["copy"].append(timed(lambda: (state.rec.clone(), state.conv.clone())))
            took["keep"].append(timed(partial(keeper.keep, sequence, state, CheckpointKind.END)))
            took["step beside"].append(timed(lambda: step(matrix)))
            asyncio.run_coroutine_threadsafe(link.drain(), loop).result()
        stats = link.stats()
        asyncio.run_coroutine_threadsafe(store.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    shown = ", ".join(f"{name} {statistics.median(values):.2f} ms" for name, values in took.items())
    print(f"medians of {num_rounds}: {shown}; published {stats['published']:.0f}")
    print(f"keep beyond one copy: {statistics.median(differences(took['keep'], took['copy'])):+.2f} ms")


def step(matrix: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        matrix = torch.tanh(matrix @ matrix)
    return matrix


def differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(left, right, strict=True)]


if __name__ == "__main__":
    main()
