"""Who waits for a prefix of somebody else's, asked of the cache itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmstate.models.backend import SequenceState
from warmstate.replicas.cache.host_tier import HostTier
from warmstate.replicas.cache.hybrid_cache import HybridCache
from warmstate.replicas.cache.parking import ParkingArea
from warmstate.replicas.cache.placement import Placement
from warmstate.replicas.cache.state_codec import CheckpointNames
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.messages import CheckpointKind, Mark
from warmstate.replicas.scheduler import PrefixMatch
from warmstate.replicas.sequence import Sequence

Build = Callable[..., Any]

SYSTEM_THEN_TURN = (Mark(CheckpointKind.SYSTEM, 70), Mark(CheckpointKind.TURN, 890))


class Waiting:
    """A cache without an engine, and sequences that ask it."""

    def __init__(self, backend: Any, request_for: Build) -> None:
        self._backend = backend
        self._request_for = request_for
        self._blocks = BlockPool(64)
        names = CheckpointNames(bytes(32), backend.shapes.num_head_groups)
        host = HostTier(backend.shapes, names, 1 << 22, lambda key, position, usable: None)
        self.cache = HybridCache(
            backend,
            self._blocks,
            host,
            ParkingArea(backend, 1 << 20),
            names,
            lambda work: work(),
            CacheConfig(),
        )
        self._num_sequences = 0

    def arrive(self, prompt: Any, marks: Any = ()) -> Sequence:
        self._num_sequences += 1
        sequence = Sequence(self._request_for(prompt, marks=marks), self._num_sequences, 4096)
        self.cache.meet(sequence)
        return sequence

    def compute(self, prompt: Any, position: int) -> None:
        """Somebody who promised nothing makes a prefix usable."""
        sequence = self.arrive(prompt)
        sequence.block_table = self._blocks.take_free(len(prompt) // 64 + 1)
        sequence.placements = (Placement(position, CheckpointKind.HINT),)
        shapes = self._backend.shapes
        self._backend.write_kv(sequence.block_table, 0, position, torch.zeros(shapes.kv_shape(position)))
        state = SequenceState(position, torch.zeros(shapes.rec_shape()), torch.zeros(shapes.conv_shape()))
        assert self.cache.keep(sequence, state)


@pytest.fixture
def waiting(fake_backend: Build, request_for: Build) -> Waiting:
    return Waiting(fake_backend(), request_for)


def test_a_sequence_that_starts_later_than_it_promised_keeps_nobody_waiting(waiting: Waiting, prompt_of: Build) -> None:
    """It found no room; meanwhile the prefix beyond its promise became usable, so it will not compute that any more."""
    first = waiting.arrive(prompt_of(900), SYSTEM_THEN_TURN)
    assert waiting.cache.find(first) == PrefixMatch(0)
    other = waiting.arrive([*prompt_of(70), *prompt_of(200, seed=1)])
    assert waiting.cache.find(other) is None
    waiting.compute(prompt_of(900), 512)
    assert waiting.cache.find(first) == PrefixMatch(512)
    assert waiting.cache.find(other) == PrefixMatch(0)


def test_a_sequence_that_waits_keeps_nobody_waiting(waiting: Waiting, prompt_of: Build) -> None:
    leader = waiting.arrive(prompt_of(900), (Mark(CheckpointKind.TURN, 890),))
    assert waiting.cache.find(leader) == PrefixMatch(0)
    follower = waiting.arrive(prompt_of(900), SYSTEM_THEN_TURN)
    assert waiting.cache.find(follower) is None
    other = waiting.arrive([*prompt_of(70), *prompt_of(200, seed=1)])
    assert waiting.cache.find(other) == PrefixMatch(0)
    waiting.cache.forget(leader)
    assert waiting.cache.find(follower) is not None
