"""Times what a large index costs: a follower that starts, the keeper's count, and a prefix with many continuations.

Run: python tests/bench/bench_index.py [--rows 100000] [--children 10000] [--rounds 3]
Half of the rows are checkpoints, half KV segments, in conversations of ten segments behind four that all share. Prints
the medians of the rounds and their extremes; asserts nothing.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import redis

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.event_follower import EventFollower
from warmstate.cache_store.eviction import EvictionPolicy
from warmstate.cache_store.eviction_rows import CheckpointRow, EvictionReason
from warmstate.cache_store.index_rows import StoredCheckpoint, StoredSegment
from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS
from warmstate.cache_store.names import IndexNames, index_names
from warmstate.cache_store.prefix_index import PrefixIndex
from warmstate.cache_store.redis_client import open_client
from warmstate.cache_store.store_census import find_broken
from warmstate.cache_store.store_ledger import load_ledger, plan

NAMESPACE = bytes(range(32))
NUM_SHARED, NUM_OWN = 4, 10
CHECKPOINT_BYTES, SEGMENT_BYTES = 20_000_000, 3_000_000


def conversations(num_rows: int) -> Iterator[list[bytes]]:
    """The keys of the segments of each, shared ones first; each of its own ten is a checkpoint too."""
    shared = [os.urandom(32) for _ in range(NUM_SHARED)]
    for _ in range(num_rows // (2 * NUM_OWN)):
        yield shared + [os.urandom(32) for _ in range(NUM_OWN)]


def fill(client: redis.Redis, names: IndexNames, num_rows: int) -> None:
    now_ms = time.time_ns() // 1_000_000
    for path in conversations(num_rows):
        segments: dict[Any, Any] = {}
        checkpoints: dict[Any, Any] = {}
        for index, key in enumerate(path):
            stop, above = (index + 1) * SEGMENT_TOKENS, path[index - 1] if index else None
            segments[key] = StoredSegment(stop, SEGMENT_BYTES, above, now_ms, 86_400, 1).encode()
            if index >= NUM_SHARED:
                parent = (stop - SEGMENT_TOKENS, above) if index > NUM_SHARED else (0, None)
                row = StoredCheckpoint(stop, 1, CHECKPOINT_BYTES, *parent, key, now_ms, 86_400, 1)
                checkpoints[key] = row.encode()
        client.hset(names.segments, mapping=segments)
        client.hset(names.checkpoints, mapping=checkpoints)


def follow(server: EmbeddedServer) -> EventFollower:
    follower = EventFollower(server.address, NAMESPACE, PrefixIndex())
    assert follower.wait_caught_up(600), "the follower reads what is there"
    return follower


def continued(num_children: int) -> tuple[EvictionPolicy, CheckpointRow]:
    """A policy in which as many conversations follow one prefix, and that prefix."""
    policy = EvictionPolicy()
    prefix = tuple(os.urandom(32) for _ in range(NUM_SHARED * SEGMENT_TOKENS // BLOCK_TOKENS))
    row = row_of(prefix)
    policy.put_segments(row.segments, SEGMENT_BYTES)
    policy.put_checkpoint(row)
    for _ in range(num_children):
        policy.put_checkpoint(row_of((*prefix, os.urandom(32))))
    return policy, row


def row_of(path: tuple[bytes, ...]) -> CheckpointRow:
    step = SEGMENT_TOKENS // BLOCK_TOKENS
    return CheckpointRow(path[-1], len(path) * BLOCK_TOKENS, CHECKPOINT_BYTES, path[step - 1 :: step], path)


def report(name: str, rounds: int, work: Callable[[], object]) -> None:
    """Prints milliseconds."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - started))
    print(f"  {name:<58}{statistics.median(times):>10.2f} ms ({min(times):.2f} to {max(times):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--children", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    names = index_names(NAMESPACE)
    with EmbeddedServer(1 << 30) as server:
        client = open_client(server.address, 1)
        fill(client, names, options.rows)
        print(f"{client.hlen(names.checkpoints)} checkpoints and {client.hlen(names.segments)} KV segments")
        followers: list[EventFollower] = []
        report("a follower starts and has caught up", options.rounds, lambda: followers.append(follow(server)))
        for follower in followers:
            follower.close()
        report("the keeper reads all rows", options.rounds, lambda: load_ledger(client, names))
        ledger = load_ledger(client, names)
        report("and looks for rows that nobody can use", options.rounds, lambda: find_broken(ledger, 0))
        surplus, now_ms = ledger.num_bytes // 20, time.time_ns() // 1_000_000
        report(
            "and chooses what to evict of a twentieth",
            options.rounds,
            lambda: plan([ledger], surplus, now_ms, {names.short: 1.0}),
        )
        client.close()
    policy, prefix = continued(options.children)
    print(f"a prefix that {options.children} checkpoints follow")
    report("it goes", 1, lambda: policy.drop(prefix.key, EvictionReason.PATH_CAP))
    report("it comes", 1, lambda: policy.put_checkpoint(prefix))


if __name__ == "__main__":
    main()
