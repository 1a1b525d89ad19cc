"""Engines over a tiny real model, and over a fake backend that is exact about what it was given."""

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from warmstate.cache_store.keys import chain_root, prefix_keys
from warmstate.cache_store.memory_store import MemoryStore
from warmstate.cache_store.store import CheckpointStore
from warmstate.kernels.select import select_kernels
from warmstate.models.backend import (
    BLOCK_TOKENS,
    BackendLimits,
    ModelBackend,
    SequenceState,
    StateShapes,
    StepOutput,
    StepPlan,
)
from warmstate.models.checkpoints.loading import load_weights
from warmstate.models.config import read_config
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint
from warmstate.models.errors import BackendError
from warmstate.models.qwen_hybrid import QwenHybrid
from warmstate.models.ranks import RankSlice
from warmstate.models.torch_backend import TorchBackend
from warmstate.replicas.cache.publication import Publication
from warmstate.replicas.cache.shared_store import SharedStore, store_endpoints
from warmstate.replicas.cache.state_codec import CheckpointNames
from warmstate.replicas.cache.store_link import StoreLink
from warmstate.replicas.config import CacheConfig, EngineConfig, StoreConfig
from warmstate.replicas.engine import Engine
from warmstate.replicas.messages import CheckpointKind, GenerateRequest, Mark, SamplingParams, TokenLogprobs

NAMESPACE = bytes(32)
FAKE_VOCAB = 97


def _digest(*parts: bytes, size: int = 16) -> bytes:
    return hashlib.blake2b(b"|".join(parts), digest_size=size).digest()


@dataclass
class FakeSlot:
    """`digest` stands for the tokens up to the last block boundary, `running` for all; `last` are three tokens."""

    position: int = 0
    digest: bytes = bytes(16)
    conv: tuple[int, ...] = (0, 0, 0)
    running: bytes = b""
    last: tuple[int, ...] = (0, 0, 0)

    def __post_init__(self) -> None:
        self.running = _digest(self.digest, repr(self.conv).encode())
        self.last = self.conv


class FakeBackend:
    """An exact stand-in: every logit is a hash of the slot's state and of all KV that the block table leads to.

    A wrong, stale or missing state or block changes the output, as it would in a model that never forgets.
    """

    def __init__(self, num_slots: int = 4, num_blocks: int = 64, max_model_len: int = 4096) -> None:
        self._shapes = StateShapes(1, 2, 2, 2, 2, 4, 1, 1, 2, torch.float32)
        self._limits = BackendLimits(num_slots, num_blocks, max_model_len, FAKE_VOCAB)
        self._slots: list[FakeSlot | None] = [None] * num_slots
        self._kv = np.full((num_blocks * BLOCK_TOKENS, 2, 2), np.nan, dtype=np.float32)
        self.num_forwards = 0
        self.num_tokens = 0
        self.max_rows = 0
        self.poison: Callable[[int], bool] = lambda sequence_id: False

    shapes = property(lambda self: self._shapes)
    limits = property(lambda self: self._limits)
    deterministic = property(lambda self: True)

    def forward(self, plan: StepPlan, tokens: npt.NDArray[np.int32]) -> StepOutput:
        for freed in set(plan.frees) - {restore.slot for restore in plan.restores}:
            self._slots[freed] = None
        self.num_forwards += 1
        self.num_tokens += plan.num_tokens
        self.max_rows = max(self.max_rows, len(plan.rows))
        logits: list[torch.Tensor] = []
        states: dict[tuple[int, int], SequenceState] = {}
        offset = 0
        for index, row in enumerate(plan.rows):
            slot = self._live(row.slot)
            if row.start != slot.position:
                raise BackendError(f"slot {row.slot} stands at {slot.position}, the row starts at {row.start}")
            places = self._places(row.block_table, row.start, row.start + row.count)
            for token, place in zip(tokens[offset : offset + row.count].tolist(), places.tolist(), strict=True):
                self._advance(slot, token, place)
                if slot.position in row.checkpoint_after:
                    states[index, slot.position] = self.read_state(row.slot)
            offset += row.count
            if row.sample:
                logits.append(self._logits(slot, row.block_table))
            if self.poison(row.sequence_id):
                logits[-1:] = [torch.full((FAKE_VOCAB,), torch.nan)] if row.sample else []
        return StepOutput(torch.stack(logits) if logits else torch.empty(0, FAKE_VOCAB), states)

    def reset_slot(self, slot: int) -> None:
        self._slots[slot] = FakeSlot()

    def state_position(self, slot: int) -> int:
        return self._live(slot).position // BLOCK_TOKENS * BLOCK_TOKENS

    def read_state(self, slot: int) -> SequenceState:
        live = self._live(slot)
        rec = torch.tensor(np.frombuffer(live.digest, dtype="<u2").astype(np.float32)).reshape(self._shapes.rec_shape())
        conv = torch.tensor(live.conv, dtype=torch.float32).expand(self._shapes.conv_shape()).clone()
        return SequenceState(self.state_position(slot), rec, conv)

    def write_state(self, slot: int, state: SequenceState) -> None:
        digest = state.rec.flatten().numpy().astype("<u2").tobytes()
        channels = state.conv[0].numpy()
        assert (channels == channels[0]).all(), "conv channels were mixed up"
        self._slots[slot] = FakeSlot(state.position, digest, tuple(int(token) for token in channels[0]))

    def read_kv(self, blocks: Sequence[int], start: int, stop: int, out: torch.Tensor) -> None:
        out[0, 0] = torch.from_numpy(self._kv[self._places(blocks, start, stop)]).transpose(0, 1)

    def write_kv(self, blocks: Sequence[int], start: int, stop: int, source: torch.Tensor) -> None:
        self._kv[self._places(blocks, start, stop)] = source[0, 0].transpose(0, 1).numpy()

    def fill_slots_with_garbage(self) -> None:
        """What an earlier holder may leave behind."""
        self._slots = [FakeSlot(0, b"garbage in slots", (1, 2, 3)) for _ in self._slots]

    def _live(self, slot: int) -> FakeSlot:
        live = self._slots[slot]
        if live is None:
            raise BackendError(f"slot {slot} was freed or never restored")
        return live

    def _places(self, blocks: Sequence[int] | npt.NDArray[np.int32], start: int, stop: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, stop)
        table = np.asarray(blocks, dtype=np.int64)
        assert (table > 0).all(), "block 0 belongs to nobody"
        return table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS

    def _advance(self, slot: FakeSlot, token: int, place: int) -> None:
        slot.running = _digest(slot.running, b"%d" % token)
        slot.last = (*slot.last[1:], token)
        self._kv[place] = ((token, slot.position), (slot.running[0], slot.running[1]))
        slot.position += 1
        if slot.position % BLOCK_TOKENS == 0:
            slot.digest, slot.conv = slot.running, slot.last
            slot.running = _digest(slot.digest, repr(slot.conv).encode())

    def _logits(self, slot: FakeSlot, table: npt.NDArray[np.int32]) -> torch.Tensor:
        seen = self._kv[self._places(table, 0, slot.position)].tobytes()
        digest = _digest(slot.running, b"%d" % slot.position, seen, size=8)
        return torch.from_numpy(np.random.default_rng(int.from_bytes(digest)).standard_normal(FAKE_VOCAB)).float()


@dataclass
class Result:
    """Everything that came out for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int | None = None
    cache_source: str = "none"
    finish_reason: str | None = None
    error: str | None = None

    @property
    def output(self) -> tuple[list[int], list[TokenLogprobs]]:
        """What must not depend on where the prefix came from."""
        return self.token_ids, self.logprobs


def collect(engine: Engine, results: dict[str, Result]) -> bool:
    """Runs one step into `results`; False when nothing could run."""
    deltas = engine.step()
    for item in deltas or []:
        result, delta = results.setdefault(item.request_id, Result()), item.delta
        assert result.finish_reason is None, "a delta came after the last one"
        result.token_ids += delta.token_ids
        result.logprobs += delta.logprobs
        if delta.num_cached_tokens is not None:
            result.num_cached_tokens, result.cache_source = delta.num_cached_tokens, delta.cache_source
        result.finish_reason, result.error = delta.finish_reason, delta.error
    return deltas is not None


def run(engine: Engine, requests: Iterable[GenerateRequest]) -> dict[str, Result]:
    """Runs requests that arrive together to their end, and checks that the engine is clean afterwards."""
    results: dict[str, Result] = {}
    for request in requests:
        engine.check(request)
        engine.add(request)
        results[request.request_id] = Result()
    while not all(result.finish_reason for result in results.values()):
        if not collect(engine, results):
            engine.wait_for_work()
    engine.check_integrity()
    return results


class SharedIndex:
    """A `StoreDirectory` that all replicas of a test look into."""

    def __init__(self) -> None:
        self.positions: dict[bytes, int] = {}
        self.told: set[bytes] = set()
        self.removed: list[int] = []
        self.lost_segments: list[bytes] = []
        self.num_hits = 0

    def find_positions(self, keys: Sequence[bytes]) -> list[int]:
        return [self.positions[key] for key in keys if key in self.positions]

    def count_known(self, keys: Sequence[bytes]) -> int:
        return max((BLOCK_TOKENS * (index + 1) for index, key in enumerate(keys) if key in self.told), default=0)

    def put(self, publication: Publication) -> None:
        self.told.update(publication.path)
        self.positions[publication.prefix_key] = publication.position

    def count_hit(self, key: bytes) -> None:
        self.num_hits += 1

    def remove(self, key: bytes, position: int) -> None:
        if self.positions.pop(key, None) is not None:
            self.removed.append(position)

    def tell_lost_segment(self, key: bytes) -> None:
        self.lost_segments.append(key)


class Sharing:
    """What replicas share in a test: a store, an index, and a loop in a thread for the traffic."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.index = SharedIndex()
        self.memory = MemoryStore(64 << 20)

    def link(self, backend: ModelBackend, store: CheckpointStore | None = None, **options: Any) -> StoreLink:
        """One replica's link; to this object's own store unless another is given."""
        names = CheckpointNames(options.pop("namespace", NAMESPACE), backend.shapes.num_head_groups)
        timeout_s = options.pop("timeout_s", 5.0)
        return StoreLink(store or self.memory, self.index, names, self.loop, lambda num_bytes: timeout_s, **options)

    def drain(self, link: StoreLink) -> None:
        """Waits until everything that was published has arrived."""
        asyncio.run_coroutine_threadsafe(link.drain(), self.loop).result(timeout=30)


_ids = itertools.count()


def make_request(tokens: Sequence[int] | npt.NDArray[np.int32], **options: Any) -> GenerateRequest:
    """A greedy request with logprobs, unless `options` (of the request or of its sampling) say otherwise."""
    ids = np.asarray(tokens, dtype=np.int32)
    root = options.pop("chain_root", chain_root())
    marks = tuple(
        mark if isinstance(mark, Mark) else Mark(CheckpointKind.TURN, mark) for mark in options.pop("marks", ())
    )
    name = options.pop("request_id", f"request-{next(_ids)}")
    num_output_tokens = options.pop("num_output_tokens", 0)
    sampling = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "logprobs": 2, "ignore_eos": True, **options})
    keys = b"".join(prefix_keys(ids.astype(np.uint32), root))
    return GenerateRequest(name, ids, sampling, root, keys, marks, num_output_tokens)


def make_prompt(length: int, seed: int = 0, vocab: int = FAKE_VOCAB) -> npt.NDArray[np.int32]:
    """Random tokens; a longer prompt of the same seed begins with the shorter one."""
    return np.random.default_rng(seed).integers(0, vocab, length).astype(np.int32)


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Two threads on a busy machine spend their time waiting for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fake_backend() -> type[FakeBackend]:
    return FakeBackend


@pytest.fixture(scope="session")
def request_for() -> Callable[..., GenerateRequest]:
    return make_request


@pytest.fixture(scope="session")
def prompt_of() -> Callable[..., npt.NDArray[np.int32]]:
    return make_prompt


@pytest.fixture(scope="session")
def run_requests() -> Callable[..., dict[str, Result]]:
    return run


@pytest.fixture(scope="session")
def collect_step() -> Callable[..., bool]:
    return collect


async def _end_tasks() -> None:
    """Ends what a test left under way."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def sharing() -> Iterator[Sharing]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Sharing(loop)
    asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result(timeout=30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def join_store(
    fake_backend: Callable[..., Any], engine_over: Callable[..., Engine], sharing: Sharing
) -> Iterator[Callable[[StoreConfig, CacheConfig], tuple[Engine, SharedStore]]]:
    """A new replica over the servers that the configuration names, which knows what they hold."""
    opened: list[SharedStore] = []

    def join(config: StoreConfig, cache: CacheConfig) -> tuple[Engine, SharedStore]:
        endpoints = store_endpoints(config)
        assert endpoints is not None
        backend = fake_backend(num_blocks=200)
        names = CheckpointNames(NAMESPACE, backend.shapes.num_head_groups)
        shared = SharedStore(endpoints, config, names, f"replica-{len(opened)}", time.time_ns(), sharing.loop, 64 << 20)
        opened.append(shared)
        asyncio.run_coroutine_threadsafe(shared.catch_up(), sharing.loop).result(10)
        return engine_over(backend, link=shared.link, cache=cache), shared

    yield join
    for shared in opened:
        asyncio.run_coroutine_threadsafe(shared.close(), sharing.loop).result(30)


@pytest.fixture(scope="session")
def demo_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of real architecture: three GDN layers and one of attention, twice over."""
    path = tmp_path_factory.mktemp("demo") / "model"
    write_demo_checkpoint(path, dtype=torch.float32, seed=3)
    return path


@pytest.fixture(scope="session")
def demo_model(demo_path: Path) -> QwenHybrid:
    config = read_config(demo_path)
    weights = load_weights(demo_path, config, RankSlice(), torch.float32)
    return QwenHybrid(config, weights, torch.float32, select_kernels(torch.float32, True), RankSlice(), None)


@pytest.fixture(scope="session")
def torch_backend(demo_model: QwenHybrid) -> Callable[..., TorchBackend]:
    """Fresh slots and blocks over the one model."""

    def build(num_slots: int = 4, num_blocks: int = 128, max_model_len: int = 4096) -> TorchBackend:
        return TorchBackend(demo_model, num_slots, num_blocks, max_model_len, deterministic=True)

    return build


@pytest.fixture(scope="session")
def engine_over() -> Callable[..., Engine]:
    """An engine over a backend; `options` are fields of `EngineConfig`, or `link`, `cache`, `fetch_policy`, ..."""

    def build(backend: ModelBackend, **options: Any) -> Engine:
        names = ("max_batch_tokens", "max_sequences", "max_queue")
        sizes = {name: options.pop(name) for name in names if name in options}
        config = EngineConfig(max_model_len=backend.limits.max_model_len, **sizes)
        cache = options.pop("cache", CacheConfig(host_bytes=64 << 20))
        # Measured times are no part of most tests: what is stored must be fetched on a busy machine, too.
        cache = replace(cache, fetch_policy=options.pop("fetch_policy", "always"))
        eos = options.pop("eos_token_ids", frozenset[int]())
        return Engine(backend, config, cache, eos, options.pop("namespace", NAMESPACE), **options)

    return build
