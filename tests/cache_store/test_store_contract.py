"""What every `CheckpointStore` promises, over memory and over a real server."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from warmstate.cache_store.codec import CHUNK_BYTES
from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import (
    CheckpointStore,
    Dropped,
    DropReason,
    Exists,
    Hit,
    Miss,
    MissReason,
    Part,
    Ready,
    Stored,
)

Run = Callable[[Awaitable[Any]], Any]
MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
EmptyLike = Callable[[dict[str, Part]], dict[str, Part]]

MAX_BYTES = 40 << 20


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, run: Run) -> Iterator[CheckpointStore]:
    made: CheckpointStore
    if request.param == "memory":
        made = MemoryStore(MAX_BYTES)
    else:
        server: EmbeddedServer = request.getfixturevalue("server")
        made = RedisStore(server.address, max_object_bytes=MAX_BYTES)
    yield made
    run(made.close())


def same_bytes(left: dict[str, Part], right: dict[str, Part]) -> bool:
    return all(bytes(part.data) == bytes(right[name].data) for name, part in left.items())


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_what_was_put_comes_back(
    store: CheckpointStore, kind: str, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key, parts = make_key(kind), make_parts()
    into = empty_like(parts)
    assert isinstance(run(store.put(key, parts)), Stored)
    assert run(store.get(key, into)) == Hit(sum(part.spec.num_bytes for part in parts.values()))
    assert same_bytes(into, parts)


@pytest.mark.parametrize("kind", ["ck", "kv"])
@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 4 * CHUNK_BYTES, 21_000_003])
def test_sizes_around_the_chunk_and_the_window_come_back(
    store: CheckpointStore,
    kind: str,
    size: int,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    key, parts = make_key(kind), make_parts(rec=("uint8", (size,)), conv=("float16", (7,)))
    into = empty_like(parts)
    run(store.put(key, parts))
    assert isinstance(run(store.get(key, into)), Hit)
    assert same_bytes(into, parts)
    run(store.delete(key))


def test_an_empty_part_is_allowed(
    store: CheckpointStore, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key, parts = make_key(), make_parts(rec=("float32", (3,)), kv_tail=("bfloat16", (2, 0, 4)))
    into = empty_like(parts)
    run(store.put(key, parts))
    assert isinstance(run(store.get(key, into)), Hit)
    assert same_bytes(into, parts)


def test_an_absent_object_is_a_miss_and_leaves_the_buffers(
    store: CheckpointStore, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    into = empty_like(make_parts())
    assert run(store.get(make_key(), into)) == Miss(MissReason.ABSENT)
    assert same_bytes(into, empty_like(make_parts()))


def test_the_first_writer_stays(
    store: CheckpointStore, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key, first = make_key(), make_parts(seed=1)
    into = empty_like(first)
    run(store.put(key, first))
    assert run(store.put(key, make_parts(seed=2))) == Exists()
    run(store.get(key, into))
    assert same_bytes(into, first)


def test_a_put_copies(
    store: CheckpointStore, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key, parts = make_key(), make_parts()
    before = {name: bytes(part.data) for name, part in parts.items()}
    into = empty_like(parts)
    run(store.put(key, parts))
    for part in parts.values():
        part.data[:] = bytes(part.data.nbytes)
    run(store.get(key, into))
    assert {name: bytes(part.data) for name, part in into.items()} == before


@pytest.mark.parametrize(
    "expected",
    [
        {"rec": ("float32", (2, 3, 4))},
        {"rec": ("float32", (2, 3, 4)), "conv": ("bfloat16", (2, 5, 3)), "more": ("int8", (1,))},
        {"rec": ("float32", (2, 4, 3)), "conv": ("bfloat16", (2, 5, 3))},
        {"rec": ("float32", (2, 3, 4)), "conv": ("float16", (2, 5, 3))},
        {"rec": ("float32", (2, 3, 5)), "conv": ("bfloat16", (2, 5, 3))},
    ],
    ids=["part missing", "part too many", "shape", "dtype", "size"],
)
@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_another_layout_than_expected_is_a_miss(
    store: CheckpointStore,
    kind: str,
    expected: dict[str, tuple[str, tuple[int, ...]]],
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    key, wanted = make_key(kind), make_parts(**expected)
    into = empty_like(wanted)
    run(store.put(key, make_parts()))
    outcome = run(store.get(key, into))
    assert isinstance(outcome, Miss)
    assert outcome.reason in (MissReason.LAYOUT, MissReason.CORRUPT)
    assert same_bytes(into, empty_like(wanted))


def test_a_deleted_object_is_absent_and_may_be_put_again(
    store: CheckpointStore, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key, parts = make_key(), make_parts()
    run(store.put(key, parts))
    run(store.delete(key))
    run(store.delete(key))
    assert run(store.get(key, empty_like(parts))) == Miss(MissReason.ABSENT)
    assert isinstance(run(store.put(key, parts)), Stored)


def test_an_object_over_the_limit_is_dropped(
    store: CheckpointStore, run: Run, make_key: MakeKey, make_parts: MakeParts
) -> None:
    outcome = run(store.put(make_key(), make_parts(rec=("uint8", (MAX_BYTES + 1,)))))
    assert isinstance(outcome, Dropped)
    assert outcome.reason is DropReason.TOO_LARGE


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_of_two_writers_at_once_one_stores_and_one_finds_it(
    store: CheckpointStore, kind: str, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key = make_key(kind)
    first, second = (make_parts(seed=seed, rec=("uint8", (9_000_000,))) for seed in (1, 2))
    into = empty_like(first)

    async def both() -> list[Stored | Exists | Dropped]:
        return list(await asyncio.gather(store.put(key, first), store.put(key, second)))

    outcomes = run(both())
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Exists", "Stored"]
    run(store.get(key, into))
    assert same_bytes(into, first if isinstance(outcomes[0], Stored) else second)
    run(store.delete(key))


def test_what_is_needed_and_lost_is_told_before_anything_is_put(
    store: CheckpointStore, run: Run, make_key: MakeKey, make_parts: MakeParts
) -> None:
    here, lost = make_key("kv"), make_key("kv")
    run(store.put(here, make_parts()))
    assert run(store.prepare([here], 1)) == run(store.prepare([], 1)) == Ready()
    assert run(store.prepare([lost, here], 1)) == Ready((lost,))


def test_a_closed_store_answers_unavailable(
    store: CheckpointStore, run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    key, parts = make_key(), make_parts()
    run(store.close())
    run(store.close())
    miss, drop = run(store.get(key, empty_like(parts))), run(store.put(key, parts))
    assert isinstance(miss, Miss)
    assert isinstance(drop, Dropped)
    assert (miss.reason, drop.reason) == (MissReason.UNAVAILABLE, DropReason.UNAVAILABLE)
    run(store.delete(key))
    refused = run(store.prepare([key], 1))
    assert isinstance(refused, Dropped)
    assert refused.reason is DropReason.UNAVAILABLE
