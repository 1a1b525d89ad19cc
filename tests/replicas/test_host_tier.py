"""The host tier: a prefix is found only while every part of it is there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmstate.cache_store.keys import chain_root, prefix_keys
from warmstate.models.backend import SequenceState
from warmstate.replicas.cache.host_tier import HostTier
from warmstate.replicas.cache.state_codec import CheckpointNames, as_part, encode_checkpoint, new_segment

KEYS = prefix_keys(list(range(640)), chain_root())
OTHER_KEYS = prefix_keys(list(range(1, 641)), chain_root())
SEGMENT_BYTES = 2 * 256 * 2 * 4


class Tier:
    """A tier over the fake's shapes, and what it told."""

    def __init__(self, shapes: Any, num_segments: int) -> None:
        self._shapes = shapes
        self.told: list[tuple[int, bool]] = []
        self.names = CheckpointNames(bytes(32), shapes.num_head_groups)
        self.tier = HostTier(shapes, self.names, num_segments * SEGMENT_BYTES + 4000, self._tell)

    def _tell(self, key: bytes, position: int, usable: bool) -> None:
        self.told.append((position, usable))

    def put_segment(self, keys: list[bytes], stop: int) -> None:
        kv = torch.full_like(new_segment(self._shapes), float(stop))
        self.tier.put_segment(self.names.segment(keys, stop), {"kv": as_part("kv", kv)})

    def put_checkpoint(self, keys: list[bytes], position: int) -> None:
        state = SequenceState(position, torch.zeros(self._shapes.rec_shape()), torch.zeros(self._shapes.conv_shape()))
        tail = torch.zeros(self._shapes.kv_shape(position % 256)) if position % 256 else None
        key = keys[position // 64 - 1]
        groups = self.names.checkpoint(key, position)
        parts = encode_checkpoint(self._shapes, state, tail)
        self.tier.put_checkpoint(key, position, dict(zip(groups, parts, strict=True)))


@pytest.fixture
def tier(fake_backend: Callable[..., Any]) -> Callable[[int], Tier]:
    return lambda num_segments: Tier(fake_backend().shapes, num_segments)


def test_the_deepest_whole_checkpoint_is_found(tier: Callable[[int], Tier]) -> None:
    held = tier(4)
    held.put_segment(KEYS, 256)
    held.put_checkpoint(KEYS, 256)
    held.put_checkpoint(KEYS, 320)
    assert held.tier.find(KEYS, 0) == 320
    assert held.tier.find(KEYS[:4], 0) == 256
    assert held.tier.find(KEYS[:3], 0) == 0
    assert held.told == [(256, True), (320, True)]


def test_a_checkpoint_whose_kv_is_gone_is_usable_only_over_resident_blocks(tier: Callable[[int], Tier]) -> None:
    held = tier(2)
    held.put_segment(KEYS, 256)
    held.put_checkpoint(KEYS, 256)
    for stop in (256, 512):
        assert held.tier.read_checkpoint(KEYS[3], 256) is not None
        held.put_segment(OTHER_KEYS, stop)
    assert held.tier.borrow(held.names.segment(KEYS, 256)) is None
    assert held.tier.find(KEYS, 0) == 0
    assert held.tier.find(KEYS, 3) == 0
    assert held.tier.find(KEYS, 4) == 256
    assert held.tier.missing_segments(KEYS, 3, 256) == [256]
    assert held.tier.read_segments(KEYS[:4], 192, {}) is None


def test_eviction_of_a_checkpoint_is_told_and_leaves_no_group(tier: Callable[[int], Tier]) -> None:
    held = tier(2)
    held.put_segment(KEYS, 256)
    held.put_checkpoint(KEYS, 256)
    for stop in (256, 512):
        held.put_segment(OTHER_KEYS, stop)
    held.put_segment(KEYS, 512)
    held.put_segment(KEYS, 256)
    assert held.told == [(256, True), (256, False)]
    assert all(held.tier.borrow(key) is None for key in held.names.checkpoint(KEYS[3], 256))
    assert held.tier.read_checkpoint(KEYS[3], 256) is None


def test_segments_at_hand_are_taken_as_they_are(tier: Callable[[int], Tier]) -> None:
    held = tier(4)
    held.put_segment(KEYS, 256)
    given = torch.ones(1)
    spans = held.tier.read_segments(KEYS[:9], 0, {512: given})
    assert spans is not None
    assert [(span.start, span.stop) for span in spans] == [(0, 256), (256, 512)]
    assert spans[1].kv is given
    assert float(spans[0].kv.flatten()[0]) == 256.0
