"""The host tier: a prefix is found only while every part of it is there, and the budget holds at every moment."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmstate.cache_store.keys import chain_root, prefix_keys
from warmstate.models.backend import SequenceState
from warmstate.replicas.cache.host_tier import HostTier, Room
from warmstate.replicas.cache.state_codec import CheckpointNames, Parts, as_part, encode_checkpoint, new_segment

KEYS = prefix_keys(list(range(1024)), chain_root())
OTHER_KEYS = prefix_keys(list(range(1, 1025)), chain_root())
FORK_KEYS = KEYS[:8] + prefix_keys(list(range(3, 515)), KEYS[7])
THIRD_KEYS = prefix_keys(list(range(2, 1026)), chain_root())
SEGMENT_BYTES = 2 * 256 * 2 * 4
STATE_BYTES = 176


class Tier:
    """A tier over the fake's shapes with room for whole segments and some states, and what it told."""

    def __init__(self, shapes: Any, num_segments: int, num_states: int) -> None:
        self._shapes = shapes
        self.told: list[tuple[int, bool]] = []
        self.usable: dict[bytes, int] = {}
        self.names = CheckpointNames(bytes(32), shapes.num_head_groups)
        self.now_s = 0.0
        self.budget_bytes = num_segments * SEGMENT_BYTES + num_states * STATE_BYTES
        self.tier = HostTier(shapes, self.names, self.budget_bytes, self._tell, lambda: self.now_s)

    def _tell(self, key: bytes, position: int, usable: bool) -> None:
        self.told.append((position, usable))
        if usable:
            self.usable[key] = position
        else:
            del self.usable[key]

    def segment(self, stop: int) -> Parts:
        return {"kv": as_part("kv", torch.full_like(new_segment(self._shapes), float(stop)))}

    def put(self, keys: list[bytes], position: int, only: set[int] | None = None, kind: str = "") -> bool:
        """A checkpoint with the segments of its path, or with `only` those that end there."""
        room = self.tier.reserve(keys, position, kind)
        if room is not None:
            self.fill(room, keys, only)
        return room is not None

    def fill(self, room: Room, keys: list[bytes], only: set[int] | None = None) -> None:
        position = room.position
        stops = [stop for stop in room.missing if only is None or stop in only]
        state = SequenceState(position, torch.zeros(self._shapes.rec_shape()), torch.zeros(self._shapes.conv_shape()))
        tail = torch.zeros(self._shapes.kv_shape(position % 256)) if position % 256 else None
        groups = self.names.checkpoint(keys[position // 64 - 1], position)
        parts = encode_checkpoint(self._shapes, state, tail)
        segments = {self.names.segment(keys, stop): self.segment(stop) for stop in stops}
        self.tier.put(room, segments, dict(zip(groups, parts, strict=True)))

    def has_segment(self, keys: list[bytes], stop: int) -> bool:
        return self.tier.borrow(self.names.segment(keys, stop)) is not None

    def evictions(self) -> dict[str, float]:
        stats = self.tier.stats()
        return {name.removeprefix("evictions_"): n for name, n in stats.items() if name.startswith("evictions_") and n}


Make = Callable[..., Tier]


@pytest.fixture
def tier(fake_backend: Callable[..., Any]) -> Make:
    return lambda num_segments, num_states=4: Tier(fake_backend().shapes, num_segments, num_states)


def test_the_deepest_whole_checkpoint_is_found(tier: Make) -> None:
    held = tier(5)
    held.put(KEYS, 256)
    held.put(KEYS, 320)
    assert held.tier.find(KEYS, 0) == 320
    assert held.tier.find(KEYS[:4], 0) == 256
    assert held.tier.find(KEYS[:3], 0) == 0
    assert held.told == [(256, True), (320, True)]


def test_a_checkpoint_over_device_blocks_is_found_but_not_announced(tier: Make) -> None:
    held = tier(4)
    held.put(KEYS, 512, only={512})
    assert held.tier.find(KEYS, 4) == 512
    assert held.told == []
    assert held.tier.stats()["checkpoints"] == 1
    assert held.tier.stats()["checkpoints_whole"] == 0


def test_kv_that_comes_later_makes_a_checkpoint_over_device_blocks_usable_for_all(tier: Make) -> None:
    held = tier(4)
    held.put(KEYS, 512, only={512})
    held.put(KEYS, 256)
    assert held.told == [(512, True), (256, True)]
    assert held.tier.find(KEYS, 0) == 512


def test_a_checkpoint_that_is_put_again_is_completed(tier: Make) -> None:
    held = tier(4)
    held.put(KEYS, 512, only={512})
    held.put(KEYS, 512)
    assert held.told == [(512, True)]
    bytes_then = held.tier.stats()["bytes"]
    held.put(KEYS, 512)
    assert held.tier.stats()["bytes"] == bytes_then == 2 * SEGMENT_BYTES + STATE_BYTES


def test_a_state_whose_device_blocks_were_reused_is_dropped_once_asked_for(tier: Make) -> None:
    """Sglang 39436: dead states filled the host tier, 0 of 8 hits."""
    held = tier(4)
    held.put(KEYS, 512, only={512})
    assert held.tier.find(KEYS, 2) == 0
    assert held.evictions() == {"orphan_state": 1, "orphan_kv": 1}
    assert held.tier.stats()["bytes"] == 0


def test_dead_states_go_before_any_that_can_be_used(tier: Make) -> None:
    held = tier(3)
    for offset in range(3):
        keys = prefix_keys(list(range(100 + offset, 612 + offset)), chain_root())
        held.put(keys, 512, only={512})
    held.put(OTHER_KEYS, 256)
    held.put(KEYS, 256)
    assert held.tier.find(OTHER_KEYS, 0) == held.tier.find(KEYS, 0) == 256
    assert set(held.evictions()) == {"orphan_state", "orphan_kv"}


def test_eviction_of_a_checkpoint_is_told_and_leaves_nothing_of_it(tier: Make) -> None:
    held = tier(2, num_states=1)
    held.put(KEYS, 512)
    held.put(OTHER_KEYS, 256)
    assert held.told == [(512, True), (512, False), (256, True)]
    assert all(held.tier.borrow(key) is None for key in held.names.checkpoint(KEYS[7], 512))
    assert not held.has_segment(KEYS, 256)
    assert not held.has_segment(KEYS, 512)
    assert held.tier.read_checkpoint(KEYS[7], 512) is None
    assert held.evictions() == {"budget": 1, "orphan_kv": 2}


def test_kv_goes_leaf_first_and_never_before_a_checkpoint_that_needs_it(tier: Make) -> None:
    held = tier(4)
    held.put(KEYS, 256)
    held.put(KEYS, 1024)
    held.tier.drop(KEYS[15])
    assert held.has_segment(KEYS, 256)
    assert not any(held.has_segment(KEYS, stop) for stop in (512, 768, 1024))
    assert held.tier.find(KEYS, 0) == 256
    assert held.evictions() == {"path_cap": 1, "orphan_kv": 3}


def test_a_branch_keeps_the_kv_it_shares(tier: Make) -> None:
    held = tier(6)
    held.put(KEYS, 1024)
    held.put(FORK_KEYS, 768)
    held.tier.drop(KEYS[15])
    assert held.tier.find(FORK_KEYS, 0) == 768
    assert not held.has_segment(KEYS, 768)


def test_making_room_for_a_deeper_checkpoint_spares_the_kv_below_it(tier: Make) -> None:
    held = tier(4, num_states=1)
    held.put(KEYS, 512)
    assert held.put(KEYS, 1024)
    assert held.told == [(512, True), (512, False), (1024, True)]
    assert held.tier.find(KEYS, 0) == 1024


def test_only_the_consumed_checkpoint_is_refreshed_on_a_hit(tier: Make) -> None:
    """Sglang 31643: refreshing the ancestors too filled the tier with states that nobody resumed."""
    held = tier(4, num_states=3)
    held.put(KEYS, 256)
    held.put(KEYS, 512)
    held.put(OTHER_KEYS, 256)
    for _ in range(3):
        assert held.tier.read_checkpoint(KEYS[7], 512) is not None
    assert held.tier.read_checkpoint(OTHER_KEYS[3], 256) is not None
    held.put(OTHER_KEYS, 512)
    assert held.tier.checkpoints_on_path(KEYS) == [(512, "")]
    assert held.tier.checkpoints_on_path(OTHER_KEYS) == [(256, ""), (512, "")]


@pytest.mark.parametrize("used", [KEYS, OTHER_KEYS], ids=["first", "second"])
def test_what_was_resumed_outlives_what_was_not(tier: Make, used: list[bytes]) -> None:
    held = tier(2, num_states=2)
    held.put(KEYS, 256)
    held.put(OTHER_KEYS, 256)
    assert held.tier.read_checkpoint(used[3], 256) is not None
    held.put(THIRD_KEYS, 256)
    assert [held.tier.find(keys, 0) == 256 for keys in (KEYS, OTHER_KEYS)] == [used is KEYS, used is OTHER_KEYS]


def test_a_state_with_one_of_its_kv_pages_is_never_restored(tier: Make) -> None:
    """LMCache 4701: only 1 of N pages was stored, and restores went on with a high hit rate and wrong answers."""
    held = tier(4)
    held.put(KEYS, 1024, only={1024})
    assert held.told == []
    assert held.tier.read_segments(KEYS, 0, {}) is None
    assert held.tier.find(KEYS, 0) == 0
    assert held.tier.stats()["bytes"] == 0


def test_the_budget_holds_from_the_reservation_on(tier: Make) -> None:
    held = tier(2, num_states=1)
    held.put(KEYS, 256)
    room = held.tier.reserve(OTHER_KEYS, 512)
    assert room is not None
    assert held.tier.stats()["bytes"] == 2 * SEGMENT_BYTES + STATE_BYTES <= held.budget_bytes
    held.fill(room, OTHER_KEYS)
    assert held.tier.stats()["bytes"] == 2 * SEGMENT_BYTES + STATE_BYTES


def test_a_checkpoint_that_does_not_come_leaves_nothing(tier: Make) -> None:
    held = tier(4)
    held.put(KEYS, 256)
    before = held.tier.stats()["bytes"]
    room = held.tier.reserve(KEYS, 512)
    assert room is not None
    assert held.tier.find(KEYS, 0) == 256
    held.tier.give_up(room)
    assert held.tier.stats()["bytes"] == before
    assert held.told == [(256, True)]


def test_what_has_room_reserved_gets_no_second_room(tier: Make) -> None:
    held = tier(4)
    room = held.tier.reserve(KEYS, 512)
    assert room is not None
    assert held.tier.reserve(KEYS, 512) is None
    held.tier.give_up(room)
    again = held.tier.reserve(KEYS, 512)
    assert again is not None
    held.fill(again, KEYS)
    assert held.tier.find(KEYS, 0) == 512


def test_a_path_larger_than_the_budget_evicts_nothing(tier: Make) -> None:
    held = tier(2)
    held.put(KEYS, 256)
    assert not held.put(KEYS, 1024)
    assert not held.put(OTHER_KEYS, 1024)
    assert held.tier.find(KEYS, 0) == 256
    assert held.tier.stats()["refused"] == 2


def test_what_a_publication_still_holds_counts_until_it_lets_go(tier: Make) -> None:
    held = tier(1, num_states=1)
    held.put(KEYS, 256)
    lent = held.tier.borrow(held.names.segment(KEYS, 256))
    assert not held.put(OTHER_KEYS, 256)
    stats = held.tier.stats()
    assert stats["lent_bytes"] == SEGMENT_BYTES
    assert stats["bytes"] <= held.budget_bytes
    assert lent is not None
    assert float(torch.frombuffer(bytearray(lent["kv"].data), dtype=torch.float32)[0]) == 256.0
    del lent
    gc.collect()
    assert held.tier.stats()["lent_bytes"] == 0
    assert held.put(OTHER_KEYS, 256)


def test_the_checkpoints_of_a_path_are_told_with_their_kinds(tier: Make) -> None:
    held = tier(5)
    held.put(KEYS, 576, kind="turn")
    held.put(KEYS, 256, kind="system")
    held.put(FORK_KEYS, 640)
    assert held.tier.checkpoints_on_path(KEYS) == [(256, "system"), (576, "turn")]
    held.tier.drop(KEYS[8])
    held.tier.drop(KEYS[8])
    assert held.tier.checkpoints_on_path(KEYS) == [(256, "system")]
    assert held.tier.checkpoints_on_path([]) == []


def test_segments_at_hand_are_taken_as_they_are(tier: Make) -> None:
    held = tier(4)
    held.put(KEYS, 256)
    given = torch.ones(1)
    spans = held.tier.read_segments(KEYS[:9], 0, {512: given})
    assert spans is not None
    assert [(span.start, span.stop) for span in spans] == [(0, 256), (256, 512)]
    assert spans[1].kv is given
    assert float(spans[0].kv.flatten()[0]) == 256.0
    assert held.tier.read_segments(KEYS[:9], 0, {}) is None
