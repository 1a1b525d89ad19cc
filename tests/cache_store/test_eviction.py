"""The eviction policy: who goes first, what goes with it, and that a naive model agrees."""

import hashlib
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from warmstate.cache_store.eviction import EvictionPolicy, plan_evictions
from warmstate.cache_store.eviction_rows import CheckpointRow, Evicted, EvictionReason
from warmstate.cache_store.keys import BLOCK_TOKENS, SEGMENT_TOKENS
from warmstate.cache_store.path_tree import PathCheckpoint

STATE_BYTES, KV_BYTES = 1000, 100


def path_of(*turns: str) -> tuple[bytes, ...]:
    """Chained keys, one per block, of a path whose block i holds turns[i]."""
    keys: list[bytes] = []
    for turn in turns:
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + turn.encode()).digest())
    return tuple(keys)


def blocks(name: str, count: int) -> list[str]:
    return [f"{name}{index}" for index in range(count)]


def row_of(path: tuple[bytes, ...], num_bytes: int = STATE_BYTES, **options: float) -> CheckpointRow:
    step = SEGMENT_TOKENS // BLOCK_TOKENS
    segments = path[step - 1 :: step]
    return CheckpointRow(path[-1], len(path) * BLOCK_TOKENS, num_bytes, segments, path, **options)  # type: ignore[arg-type]


def put(policy: EvictionPolicy, path: tuple[bytes, ...], num_bytes: int = STATE_BYTES) -> bytes:
    """A checkpoint at the end of `path` with all its KV."""
    row = row_of(path, num_bytes)
    for key in row.segments:
        policy.put_segment(key, KV_BYTES)
    policy.put_checkpoint(row)
    return row.key


def gone(evicted: list[Evicted], kind: str) -> list[bytes]:
    return [each.key for each in evicted if each.kind == kind]


def test_the_checkpoint_that_saves_least_per_byte_goes_first() -> None:
    policy = EvictionPolicy()
    long = put(policy, path_of(*blocks("a", 12)))
    short = put(policy, path_of(*blocks("b", 2)))
    large = put(policy, path_of(*blocks("c", 12)), num_bytes=20_000)
    evicted = policy.evict(0)
    assert gone(evicted, "ck") == [large, short, long]
    assert policy.num_bytes == 0


def test_what_a_shallower_checkpoint_on_the_path_saves_is_not_counted_again() -> None:
    policy = EvictionPolicy()
    system, turn = path_of(*blocks("s", 8)), path_of(*blocks("s", 8), "turn")
    put(policy, turn)
    alone = policy.find(turn[-1])
    assert alone is not None
    assert policy.value(alone) == 9 * 64 / (STATE_BYTES + 2 * KV_BYTES)
    put(policy, system)
    assert policy.value(alone) == 64 / STATE_BYTES
    policy.drop(system[-1], EvictionReason.PATH_CAP)
    assert policy.value(alone) == 9 * 64 / (STATE_BYTES + 2 * KV_BYTES)


def test_a_checkpoint_on_another_branch_of_the_same_segment_is_no_parent() -> None:
    policy = EvictionPolicy()
    put(policy, path_of(*blocks("s", 4), "x", "y"))
    other = policy.find(put(policy, path_of(*blocks("s", 4), "z", "y", "w")))
    assert other is not None
    assert other.find_parent() is None


def test_a_hit_refreshes_only_the_checkpoint_that_was_consumed() -> None:
    policy = EvictionPolicy()
    above = put(policy, path_of(*blocks("s", 4)))
    below = put(policy, path_of(*blocks("s", 8)))
    before = policy.value(policy.find(above))  # type: ignore[arg-type]
    policy.touch(below, now_s=1.0)
    assert policy.value(policy.find(above)) == before  # type: ignore[arg-type]
    assert policy.find(below).hits > 1.9  # type: ignore[union-attr]
    assert gone(policy.evict(policy.num_bytes - 1), "ck") == [above]


def test_a_checkpoint_is_worth_less_once_a_shallower_one_is_there_and_more_once_it_has_gone() -> None:
    def prepared() -> tuple[EvictionPolicy, tuple[bytes, ...], bytes]:
        policy, path = EvictionPolicy(), path_of(*blocks("a", 16))
        put(policy, path)
        return policy, path, put(policy, path_of(*blocks("b", 6)))

    policy, path, other = prepared()
    put(policy, path[:15])
    assert gone(policy.evict(policy.num_bytes - 1), "ck") == [path[-1]]
    policy, path, other = prepared()
    put(policy, path[:15])
    policy.drop(path[14], EvictionReason.PATH_CAP)
    assert gone(policy.evict(policy.num_bytes - 1), "ck") == [other]


def test_what_is_used_starts_anew_from_the_worth_of_what_was_evicted_last() -> None:
    policy = EvictionPolicy()
    kept, evicted = put(policy, path_of("kept", "on")), put(policy, path_of("evicted"))
    assert gone(policy.evict(policy.num_bytes - 1), "ck") == [evicted]
    policy.touch(kept, now_s=0.0)
    assert policy.value(policy.find(kept)) == 64 / STATE_BYTES + 2 * 128 / STATE_BYTES  # type: ignore[arg-type]


def test_hits_of_long_ago_count_less() -> None:
    policy = EvictionPolicy(half_life_s=10.0)
    key = put(policy, path_of("a"))
    for now_s in (0.0, 10.0, 1000.0):
        policy.touch(key, now_s)
    assert policy.find(key).hits == pytest.approx(1.0)  # type: ignore[union-attr]


def test_what_nobody_uses_grows_old_however_much_it_was_worth() -> None:
    policy = EvictionPolicy()
    once_loved = put(policy, path_of(*blocks("a", 8)))
    for _ in range(20):
        policy.touch(once_loved, now_s=0.0)
    for number in range(400):
        put(policy, path_of(*blocks(f"n{number}", 4)))
        evicted = policy.evict(5 * STATE_BYTES)
        if once_loved in gone(evicted, "ck"):
            return
    pytest.fail("it was never evicted")


def test_kv_goes_with_the_last_checkpoint_that_needs_it_the_deepest_first() -> None:
    policy = EvictionPolicy()
    shallow, deep = path_of(*blocks("s", 5)), path_of(*blocks("s", 16))
    put(policy, shallow)
    put(policy, deep)
    evicted = policy.drop(deep[-1], EvictionReason.BUDGET)
    assert gone(evicted, "kv") == [deep[15], deep[11], deep[7]]
    assert {each.reason for each in evicted} == {EvictionReason.BUDGET, EvictionReason.ORPHAN_KV}
    evicted = policy.drop(shallow[-1], EvictionReason.BUDGET)
    assert gone(evicted, "kv") == [deep[3]]
    assert policy.num_bytes == 0


def test_a_shallower_checkpoint_takes_no_kv_that_a_deeper_one_needs() -> None:
    policy = EvictionPolicy()
    shallow, deep = path_of(*blocks("s", 4)), path_of(*blocks("s", 8))
    put(policy, shallow)
    put(policy, deep)
    assert gone(policy.drop(shallow[-1], EvictionReason.BUDGET), "kv") == []
    assert policy.find(deep[-1]).is_whole  # type: ignore[union-attr]


def test_a_checkpoint_whose_kv_is_lost_is_told_and_goes_before_any_whole_one() -> None:
    told: list[tuple[int, bool]] = []
    policy = EvictionPolicy(listener=lambda key, position, whole: told.append((position, whole)))
    path = path_of(*blocks("a", 20))
    put(policy, path)
    put(policy, path[:4])
    poor = put(policy, path_of("b"))
    policy.lose_segment(path[11])
    assert told == [(1280, True), (256, True), (64, True), (1280, False)]
    evicted = policy.evict(policy.num_bytes - 1)
    assert evicted[0] == Evicted("ck", path[-1], 1280, EvictionReason.ORPHAN_STATE)
    assert gone(evicted, "kv") == [path[19], path[15], path[7]]
    assert policy.find(poor) is not None


def test_a_lost_segment_that_comes_back_makes_its_checkpoints_whole() -> None:
    told: list[bool] = []
    policy = EvictionPolicy(listener=lambda key, position, whole: told.append(whole))
    path = path_of(*blocks("a", 8))
    put(policy, path)
    policy.lose_segment(path[3])
    policy.put_segment(path[3], KV_BYTES)
    assert told == [True, False, True]
    assert policy.drop_orphans() == []


def test_orphans_go_at_once() -> None:
    policy = EvictionPolicy()
    broken, whole = path_of(*blocks("a", 8)), path_of(*blocks("b", 8))
    policy.put_checkpoint(row_of(broken))
    policy.put_segment(broken[7], KV_BYTES)
    policy.put_segment(path_of("nobody")[0], KV_BYTES)
    put(policy, whole)
    evicted = policy.drop_orphans()
    assert gone(evicted, "ck") == [broken[-1]]
    assert set(gone(evicted, "kv")) == {broken[7], path_of("nobody")[0]}
    assert policy.num_bytes == STATE_BYTES + 2 * KV_BYTES


def test_nothing_on_a_reserved_path_goes() -> None:
    policy = EvictionPolicy()
    system, turn = path_of(*blocks("s", 4)), path_of(*blocks("s", 8))
    put(policy, system)
    policy.reserve(row_of(turn))
    evicted = policy.evict(0)
    assert gone(evicted, "ck") == [system[-1]]
    assert gone(evicted, "kv") == []
    policy.put_segment(turn[7], KV_BYTES)
    policy.commit(turn[-1])
    assert policy.find(turn[-1]).is_whole  # type: ignore[union-attr]


def test_a_plan_drops_orphans_and_then_the_least_worth_down_to_the_target() -> None:
    used, idle, broken = (path_of(*blocks(name, 4)) for name in "abc")
    rows = [row_of(used, hits=5.0, last_use_s=1000.0), row_of(idle, hits=5.0, last_use_s=0.0), row_of(broken)]
    segments = [(used[3], KV_BYTES), (idle[3], KV_BYTES)]
    kept_all = plan_evictions(rows, segments, 10_000, now_s=1000.0)
    assert kept_all == [Evicted("ck", broken[-1], 256, EvictionReason.ORPHAN_STATE)]
    full = plan_evictions(rows, segments, 2 * STATE_BYTES, now_s=1000.0)
    assert gone(full, "ck") == [broken[-1], idle[-1]]
    assert gone(full, "kv") == [idle[3]]


def test_a_plan_needs_only_the_keys_of_segments_and_gains_from_those_of_checkpoints() -> None:
    first, second, tail = b"s1" * 16, b"s2" * 16, b"p" * 32
    shallow = CheckpointRow(tail, 320, STATE_BYTES, segments=(first,))
    deep = CheckpointRow(second, 512, STATE_BYTES, segments=(first, second))
    segments = [(first, KV_BYTES), (second, KV_BYTES)]
    target = STATE_BYTES + 2 * KV_BYTES
    assert gone(plan_evictions([deep, shallow], segments, target, now_s=0.0), "ck") == [tail]
    informed = replace(deep, boundaries=(first, tail, second))
    evicted = plan_evictions([shallow, informed], segments, target, now_s=0.0)
    assert [(each.kind, each.key) for each in evicted] == [("ck", second), ("kv", second)]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_path_whose_middle_was_lost_does_not_keep_the_rest_from_being_planned(is_first: bool) -> None:
    _, upper, parent, lower, deep = path_of("a", "b", "c", "d", "e")
    # Nothing tells what lies above `lower`, whose row is lost, but that `parent` does.
    broken = CheckpointRow(deep, 576, STATE_BYTES, segments=(lower,), boundaries=(parent, lower, deep))
    whole = CheckpointRow(parent, 320, STATE_BYTES, segments=(upper,), boundaries=(upper, parent))
    rows = [broken, whole] if is_first else [whole, broken]
    evicted = plan_evictions(rows, [(upper, KV_BYTES)], 10_000, now_s=0.0)
    assert [(each.kind, each.key) for each in evicted] == [("ck", deep)]


def test_rows_that_contradict_each_other_end_no_plan() -> None:
    one, other, third = path_of("a", "b", "c")
    rows = [
        CheckpointRow(other, 512, STATE_BYTES, segments=(one,), boundaries=(one, other)),
        CheckpointRow(one, 512, STATE_BYTES, segments=(third,), boundaries=(third, other, one)),
        CheckpointRow(third, 512, STATE_BYTES, segments=(other,), boundaries=(one, other, third)),
    ]
    evicted = plan_evictions(rows, [(one, KV_BYTES)], 0, now_s=0.0)
    assert sorted(gone(evicted, "ck")) == sorted([one, other, third])


class CountingPolicy(EvictionPolicy):
    """Counts how often it works out what a checkpoint is worth."""

    num_valued = 0

    def value(self, checkpoint: PathCheckpoint) -> float:
        self.num_valued += 1
        return super().value(checkpoint)


def put_chats(policy: EvictionPolicy, system: tuple[bytes, ...], count: int) -> list[bytes]:
    """Checkpoints one block behind a prefix whose KV is there."""
    paths = [(*system, hashlib.sha256(b"%d" % number).digest()) for number in range(count)]
    for path in paths:
        policy.put_checkpoint(row_of(path))
    return [path[-1] for path in paths]


def test_no_call_values_all_that_follows_a_prefix_which_comes_or_goes() -> None:
    """An engine's step waits for it: a system prompt may have ten thousand conversations behind it."""
    policy, system = CountingPolicy(), path_of(*blocks("s", 4))
    put(policy, system)
    chats = put_chats(policy, system, 3000)
    policy.drop(system[-1], EvictionReason.PATH_CAP)
    policy.revalue_all()
    for change in (
        lambda: policy.put_checkpoint(row_of(system)),
        lambda: policy.touch(system[-1], 1.0),
        lambda: policy.drop(system[-1], EvictionReason.PATH_CAP),
        lambda: policy.touch(chats[0], 2.0),
    ):
        policy.num_valued = 0
        change()
        assert 0 < policy.num_valued < 100
    policy.num_valued = 0
    policy.revalue_all()
    assert policy.num_valued > 2700


def test_what_waited_for_its_value_goes_in_the_right_order_all_the_same() -> None:
    """Where the prefix was taken away, its continuations save more; nobody else does."""
    policy, system = EvictionPolicy(), path_of(*blocks("s", 40))
    put(policy, system)
    chats = set(put_chats(policy, system, 200))
    other = put(policy, path_of(*blocks("o", 8)))
    policy.drop(system[-1], EvictionReason.PATH_CAP)
    policy.revalue_all()
    assert gone(policy.evict(policy.num_bytes - 1), "ck") == [other]
    assert set(gone(policy.evict(0), "ck")) == chats


@dataclass
class NaiveCheckpoint:
    """What the model remembers; everything else is worked out anew each time."""

    path: tuple[bytes, ...]
    num_bytes: int
    hits: float = 1.0
    last_use_s: float = 0.0
    base: float = 0.0


class PolicyAgainstModel(RuleBasedStateMachine):
    """The policy does what a model does that looks at everything each time."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[bytes, bool] = {}
        self.policy = EvictionPolicy(listener=lambda key, position, whole: self.told.__setitem__(key, whole))
        self.checkpoints: dict[bytes, NaiveCheckpoint] = {}
        self.kv: set[bytes] = set()
        self.clock, self.now_s = 0.0, 0.0

    def needs(self, checkpoint: NaiveCheckpoint) -> tuple[bytes, ...]:
        return checkpoint.path[3::4]

    def whole(self, checkpoint: NaiveCheckpoint) -> bool:
        return all(key in self.kv for key in self.needs(checkpoint))

    def value(self, checkpoint: NaiveCheckpoint) -> float:
        depth = max(
            (d for d in range(1, len(checkpoint.path)) if checkpoint.path[d - 1] in self.checkpoints), default=0
        )
        num_kv = sum(key in self.kv for key in checkpoint.path[depth:] if key in self.needs(checkpoint))
        saved = float((len(checkpoint.path) - depth) * 64)
        return checkpoint.base + checkpoint.hits * saved / (checkpoint.num_bytes + num_kv * KV_BYTES)

    def num_bytes(self) -> int:
        return sum(c.num_bytes for c in self.checkpoints.values()) + len(self.kv) * KV_BYTES

    def remove(self, key: bytes) -> None:
        del self.checkpoints[key]
        self.kv &= {segment for checkpoint in self.checkpoints.values() for segment in self.needs(checkpoint)}

    def evict(self, target: int) -> list[bytes]:
        victims: list[bytes] = []
        while self.num_bytes() > target and self.checkpoints:
            order = [(self.whole(c), self.value(c), c.last_use_s, key) for key, c in self.checkpoints.items()]
            is_whole, value, _, key = min(order)
            self.clock = max(self.clock, value) if is_whole else self.clock
            self.remove(key)
            victims.append(key)
        return victims

    @rule(path=st.lists(st.sampled_from("ab"), min_size=1, max_size=10), size=st.sampled_from([500, 1000, 4000]),
          with_kv=st.booleans())  # fmt: skip
    def put(self, path: list[str], size: int, with_kv: bool) -> None:
        keys = path_of(*path)
        if keys[-1] in self.checkpoints:
            return
        row = row_of(keys, size)
        self.policy.reserve(row)
        for key in row.segments if with_kv else ():
            self.policy.put_segment(key, KV_BYTES)
            self.kv.add(key)
        self.policy.commit(row.key)
        self.checkpoints[row.key] = NaiveCheckpoint(keys, size, base=self.clock)

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 1.0, 900.0]))
    def touch(self, data: st.DataObject, seconds: float) -> None:
        key = data.draw(st.sampled_from(sorted(self.checkpoints)))
        self.now_s += seconds
        self.policy.touch(key, self.now_s)
        found = self.checkpoints[key]
        found.hits = 1.0 + found.hits * 0.5 ** ((self.now_s - found.last_use_s) / 600.0)
        found.last_use_s, found.base = self.now_s, self.clock

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.checkpoints)))
        self.policy.drop(key, EvictionReason.PATH_CAP)
        self.remove(key)

    @precondition(lambda self: self.kv)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.kv)))
        self.policy.lose_segment(key)
        self.kv.discard(key)

    @rule(share=st.sampled_from([0.0, 0.5, 0.8, 0.95]))
    def evict_some(self, share: float) -> None:
        target = int(share * self.num_bytes())
        assert gone(self.policy.evict(target), "ck") == self.evict(target)
        assert self.policy.num_bytes <= max(target, 0)

    @rule()
    def drop_orphans(self) -> None:
        broken = {key for key, checkpoint in self.checkpoints.items() if not self.whole(checkpoint)}
        assert set(gone(self.policy.drop_orphans(), "ck")) == broken
        for key in broken:
            self.remove(key)

    @invariant()
    def agrees(self) -> None:
        assert self.policy.num_bytes == self.num_bytes()
        assert self.policy.num_checkpoints == len(self.checkpoints)
        for key, checkpoint in self.checkpoints.items():
            found = self.policy.find(key)
            assert found is not None
            assert found.is_whole == self.whole(checkpoint) == self.told.get(key, False)
            assert self.policy.value(found) == pytest.approx(self.value(checkpoint))
        whole = {key for key, is_whole in self.told.items() if is_whole}
        assert whole <= self.checkpoints.keys()
        assert self.policy.num_whole == len(whole)


TestPolicyAgainstModel = PolicyAgainstModel.TestCase
TestPolicyAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
