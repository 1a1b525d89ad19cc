"""The host tier against a model that looks at everything each time, over random forks of random paths."""

import hashlib
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from warmstate.cache_store.keys import ObjectKey
from warmstate.models.backend import SequenceState, StateShapes
from warmstate.replicas.cache.host_tier import HostTier, Room
from warmstate.replicas.cache.state_codec import CheckpointNames, Parts, as_part, encode_checkpoint, new_segment

SHAPES = StateShapes(1, 2, 2, 2, 2, 4, 1, 1, 2, torch.float32)
NAMES = CheckpointNames(bytes(32), SHAPES.num_head_groups)
SEGMENT_BYTES = 2 * 256 * 2 * 4
TAIL_BYTES_PER_BLOCK = SEGMENT_BYTES // 4
STATE_BYTES = 176
BUDGET_BYTES = 7 * SEGMENT_BYTES

Path = tuple[bytes, ...]


def chain(turns: list[str]) -> Path:
    keys: list[bytes] = []
    for turn in turns:
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + turn.encode()).digest())
    return tuple(keys)


def number_of(key: bytes) -> float:
    """What the tensors of a key are filled with, so that another's cannot be taken for them."""
    return float(int.from_bytes(key[:2]))


def segment_of(key: bytes) -> Parts:
    return {"kv": as_part("kv", torch.full_like(new_segment(SHAPES), number_of(key)))}


def groups_of(path: Path) -> dict[Any, Parts]:
    position, fill = len(path) * 64, number_of(path[-1])
    state = SequenceState(
        position, torch.full(SHAPES.rec_shape(), fill), torch.full(SHAPES.conv_shape(), fill, dtype=SHAPES.dtype)
    )
    tail = torch.full(SHAPES.kv_shape(position % 256), fill) if position % 256 else None
    return dict(zip(NAMES.checkpoint(path[-1], position), encode_checkpoint(SHAPES, state, tail), strict=True))


def segments_on(path: Path) -> Path:
    return path[3::4]


class TierAgainstModel(RuleBasedStateMachine):
    """Whole or absent, never over budget, leaf-first, no orphans, and told the truth about."""

    paths = Bundle("paths")

    def __init__(self) -> None:
        super().__init__()
        self.usable: dict[bytes, int] = {}
        self.put_paths: dict[bytes, Path] = {}
        self.was_whole: set[bytes] = set()
        self.on_loan: list[tuple[ObjectKey, Parts]] = []
        self.now_s = 0.0
        self.tier = HostTier(SHAPES, NAMES, BUDGET_BYTES, self.tell, lambda: self.now_s)

    def tell(self, key: bytes, position: int, usable: bool) -> None:
        assert (key in self.usable) != usable, "told what was known"
        if usable:
            self.usable[key] = position
        else:
            del self.usable[key]

    def here(self, path: Path) -> bool:
        """Whether the checkpoint is here: in all its head groups, or in none."""
        found = [self.tier.borrow(key) is not None for key in NAMES.checkpoint(path[-1], len(path) * 64)]
        assert len(set(found)) == 1, "a checkpoint is here in part"
        return found[0]

    def has_kv(self, path: Path, num_resident: int = 0) -> bool:
        ends = range(num_resident // 4 * 4 + 4, len(path) + 1, 4)
        return all(self.tier.borrow(NAMES.segment(path, 64 * end)) is not None for end in ends)

    @rule(target=paths, turns=st.lists(st.sampled_from("ab"), min_size=1, max_size=18))
    def walk(self, turns: list[str]) -> Path:
        return chain(turns)

    @rule(path=paths, share=st.sampled_from(["all", "all", "all", "last", "none"]))
    def put(self, path: Path, share: str) -> None:
        room = self.tier.reserve(path, len(path) * 64, "kind")
        if room is None:
            return
        stops = {"all": room.missing, "last": room.missing[-1:], "none": ()}[share]
        segments = {NAMES.segment(path, stop): segment_of(path[stop // 64 - 1]) for stop in stops}
        self.tier.put(room, segments, groups_of(path))
        self.put_paths[path[-1]] = path
        assert self.here(path), "what was put with room is not here"

    @rule(path=paths)
    def give_up(self, path: Path) -> None:
        room = self.tier.reserve(path, len(path) * 64)
        if isinstance(room, Room):
            assert self.tier.stats()["bytes"] <= BUDGET_BYTES
            self.tier.give_up(room)

    @rule(path=paths, num_resident=st.integers(0, 18))
    def find(self, path: Path, num_resident: int) -> None:
        num_resident = min(num_resident, len(path))
        depths = [d for d in range(1, len(path) + 1) if path[d - 1] in self.put_paths and self.here(path[:d])]
        good = [d for d in depths if self.has_kv(path[:d], num_resident)]
        assert self.tier.find(path, num_resident) == 64 * max(good, default=0)
        assert all(not self.here(path[:d]) for d in depths if d > max(good, default=0)), "dead weight was left"

    @rule(path=paths, seconds=st.sampled_from([0.0, 1.0, 1000.0]))
    def resume(self, path: Path, seconds: float) -> None:
        self.now_s += seconds
        expected = path[-1] in self.put_paths and self.here(path)
        buffers = self.tier.read_checkpoint(path[-1], len(path) * 64)
        assert (buffers is not None) == expected
        if buffers is not None:
            state = buffers.state()
            assert bool((state.rec == number_of(path[-1])).all())
            assert bool((state.conv == number_of(path[-1])).all())
        spans = self.tier.read_segments(path, 0, {}) if path[-1] in self.usable else None
        for span in spans or []:
            assert bool((span.kv == number_of(path[span.stop // 64 - 1])).all())

    @rule(path=paths)
    def cap(self, path: Path) -> None:
        self.tier.drop(path[-1])
        assert path[-1] not in self.put_paths or not self.here(path)

    @rule(path=paths)
    def lend(self, path: Path) -> None:
        for end in range(4, len(path) + 1, 4):
            key = NAMES.segment(path, 64 * end)
            parts = self.tier.borrow(key)
            if parts is not None and len(self.on_loan) < 2:
                self.on_loan.append((key, parts))

    @rule()
    def bring_back(self) -> None:
        for key, parts in self.on_loan:
            read = torch.frombuffer(bytearray(parts["kv"].data), dtype=torch.float32)
            assert bool((read == number_of(key.prefix)).all())
        self.on_loan.clear()

    @invariant()
    def holds(self) -> None:
        stats = self.tier.stats()
        here = {key: path for key, path in self.put_paths.items() if self.here(path)}
        needed = {segment for path in here.values() for segment in segments_on(path)}
        known = {key: 256 * (i + 1) for path in self.put_paths.values() for i, key in enumerate(segments_on(path))}
        kv = {key for key, stop in known.items() if self.tier.borrow(NAMES.segment([key] * (stop // 64), stop))}
        assert kv <= needed, "KV that no checkpoint can use"
        whole = {key for key, path in here.items() if self.has_kv(path)}
        assert self.usable == {key: len(here[key]) * 64 for key in whole}
        assert self.was_whole & here.keys() <= whole, "KV went before a checkpoint that needs it"
        self.was_whole = whole
        tails = sum(len(path) % 4 for path in here.values()) * TAIL_BYTES_PER_BLOCK
        held = len(kv) * SEGMENT_BYTES + len(here) * STATE_BYTES + tails
        assert stats["bytes"] == held + stats["lent_bytes"] <= BUDGET_BYTES
        assert (stats["checkpoints"], stats["checkpoints_whole"]) == (len(here), len(whole))
        lent = {id(parts) for key, parts in self.on_loan if self.tier.borrow(key) is not parts}
        assert stats["lent_bytes"] == len(lent) * SEGMENT_BYTES


TestTierAgainstModel = TierAgainstModel.TestCase
TestTierAgainstModel.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
