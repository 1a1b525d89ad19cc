"""Times the host tier's bookkeeping when it is small and when it is full of 100,000 segments under 10,000 checkpoints.

Run: python tests/bench/bench_host_tier.py [--checkpoints 1000 10000] [--rounds 500]
Prints mean microseconds per operation; asserts nothing. Tensors are tiny, so that no time is spent on copying.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch

from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS
from warmstate.models.backend import SequenceState, StateShapes
from warmstate.replicas.cache.host_tier import HostTier
from warmstate.replicas.cache.state_codec import (
    CheckpointNames,
    as_part,
    encode_checkpoint,
    new_segment,
    state_bytes,
)

SHAPES = StateShapes(1, 1, 1, 1, 1, 4, 1, 1, 1, torch.float32)
NAMES = CheckpointNames(bytes(32), SHAPES.num_head_groups)
SYSTEM_BLOCKS, OWN_SEGMENTS = 16, 10
PATH_BLOCKS = SYSTEM_BLOCKS + OWN_SEGMENTS * SEGMENT_TOKENS // BLOCK_TOKENS
SYSTEM = tuple(os.urandom(32) for _ in range(SYSTEM_BLOCKS))

Path = tuple[bytes, ...]


def new_path() -> Path:
    """A chat of its own behind the system prompt that all share."""
    return (*SYSTEM, *(os.urandom(32) for _ in range(PATH_BLOCKS - SYSTEM_BLOCKS)))


def put(tier: HostTier, path: Path) -> None:
    position = len(path) * BLOCK_TOKENS
    room = tier.reserve(path, position)
    assert room is not None, "the budget holds one path"
    state = SequenceState(position, torch.empty(SHAPES.rec_shape()), torch.empty(SHAPES.conv_shape()))
    segments = {NAMES.segment(path, stop): {"kv": as_part("kv", new_segment(SHAPES))} for stop in room.missing}
    groups = dict(zip(NAMES.checkpoint(path[-1], position), encode_checkpoint(SHAPES, state, None), strict=True))
    tier.put(room, segments, groups)


def filled(num_checkpoints: int) -> tuple[HostTier, list[Path]]:
    """A tier that is full, and the paths in it."""
    segment_bytes = state_bytes(SHAPES, SEGMENT_TOKENS) - state_bytes(SHAPES, 0)
    system_bytes = SYSTEM_BLOCKS * BLOCK_TOKENS // SEGMENT_TOKENS * segment_bytes + state_bytes(SHAPES, 0)
    own_bytes = OWN_SEGMENTS * segment_bytes + state_bytes(SHAPES, 0)
    tier = HostTier(SHAPES, NAMES, system_bytes + num_checkpoints * own_bytes, lambda key, position, usable: None)
    put(tier, SYSTEM)
    paths = [new_path() for _ in range(num_checkpoints)]
    for path in paths:
        put(tier, path)
    return tier, paths


def time_each(operation: Callable[[Path], object], paths: list[Path]) -> float:
    """Mean microseconds."""
    started = time.perf_counter()
    for path in paths:
        operation(path)
    return 1e6 * (time.perf_counter() - started) / len(paths)


def measure(num_checkpoints: int, num_rounds: int) -> dict[str, float]:
    tier, paths = filled(num_checkpoints)
    sample = paths[:: max(len(paths) // num_rounds, 1)][:num_rounds]
    fresh = [new_path() for _ in range(num_rounds)]
    figures = {
        "find a checkpoint": time_each(lambda path: tier.find(path, 0), sample),
        "find the system prompt": time_each(lambda path: tier.find(path, 0), fresh),
        "resume a checkpoint": time_each(lambda path: tier.read_checkpoint(path[-1], PATH_BLOCKS * 64), sample),
    }
    evicted_before = tier.stats()["evictions_budget"]
    figures[f"put a path of {OWN_SEGMENTS} segments, evicting"] = time_each(lambda path: put(tier, path), fresh)
    assert tier.stats()["evictions_budget"] >= evicted_before + num_rounds, "each put evicts"
    figures["drop a checkpoint and its KV"] = time_each(lambda path: tier.drop(path[-1]), fresh)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--rounds", type=int, default=500)
    arguments = parser.parse_args()
    for num_checkpoints in arguments.checkpoints:
        print(f"{num_checkpoints} checkpoints over {num_checkpoints * OWN_SEGMENTS} segments")
        for name, microseconds in measure(num_checkpoints, arguments.rounds).items():
            print(f"  {name:45} {microseconds:9.1f} us")


if __name__ == "__main__":
    main()
