"""Owns the state of one request inside the engine. Knows nothing of how it is scheduled, computed or cached."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from warmstate.cache_store.keys import split_keys
from warmstate.models.backend import BLOCK_TOKENS, SequenceState
from warmstate.replicas.cache.fetch_miss import FetchMiss
from warmstate.replicas.cache.fetch_rule import FetchDecision
from warmstate.replicas.cache.placement import checkpoint_positions
from warmstate.replicas.messages import CacheSource, FinishReason, GenerateRequest
from warmstate.replicas.sampler import draw_seed


class SequenceStatus(StrEnum):
    """Where a sequence stands. FETCHING ones queue too, but are passed over until their prefix has come."""

    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class KvSpan:
    """KV of positions [start, stop) in the canonical layout; it may begin before the range that is needed."""

    start: int
    stop: int
    kv: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """Everything a sequence needs, on the host, to continue at `position` beside its resident blocks."""

    position: int
    state: SequenceState
    spans: tuple[KvSpan, ...]
    source: CacheSource

    @property
    def num_bytes(self) -> int:
        tensors = [self.state.rec, self.state.conv, *(span.kv for span in self.spans)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: its tokens, how many of them are computed, and the slot and blocks it holds while it runs."""

    request: GenerateRequest
    arrival: int
    context_limit: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_tokens: int = 0
    num_computed: int = 0
    slot: int | None = None
    block_table: list[int] = field(default_factory=list)
    num_shared_blocks: int = 0
    num_keyed_blocks: int = 0
    num_cached_tokens: int | None = None
    cache_source: CacheSource = "none"
    seed: int = 0
    fetched: LoadedPrefix | None = None
    was_fetched: bool = False
    waited_to_fetch: bool = False
    fetch_decision: FetchDecision | None = None
    fetch_miss: FetchMiss | None = None
    num_state: int = 0
    has_started: bool = False
    twin_leader: int | None = None
    finish_reason: FinishReason | None = None
    checkpoints: tuple[int, ...] = field(init=False)
    prefix_keys: tuple[bytes, ...] = field(init=False)
    _tokens: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        prompt = self.request.token_ids
        room = max(1, min(self.request.sampling.max_tokens, self.context_limit - len(prompt)))
        self._tokens = np.empty(len(prompt) + room, dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self.num_tokens = len(prompt)
        self.seed = draw_seed() if self.request.sampling.seed is None else self.request.sampling.seed
        self.prefix_keys = tuple(split_keys(self.request.prompt_keys)[: len(prompt) // BLOCK_TOKENS])
        positions = checkpoint_positions(self.num_prompt_tokens, self.request.marks)
        self.checkpoints = tuple(p for p in positions if self.find_key(p) is not None)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated here."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated here and, before a failover, elsewhere."""
        return self.request.num_output_tokens + self.num_generated

    @property
    def num_remaining(self) -> int:
        """Known tokens that are not computed yet; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining == 1 and self.num_generated > 0

    @property
    def output_token_ids(self) -> npt.NDArray[np.int32]:
        return self._tokens[self.num_prompt_tokens - self.request.num_output_tokens : self.num_tokens]

    @property
    def original_token_ids(self) -> npt.NDArray[np.int32]:
        """The prompt, without what was generated elsewhere."""
        return self._tokens[: self.num_prompt_tokens - self.request.num_output_tokens]

    @property
    def is_full(self) -> bool:
        """Whether `max_tokens` or the context is used up."""
        return self.num_tokens == len(self._tokens)

    def get_tokens(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        return self._tokens[start:stop]

    def put_token(self, token_id: int) -> None:
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def find_next_block_key(self) -> bytes | None:
        """The prefix key of the first computed block that has not been made findable; None when there is none."""
        stop = (self.num_keyed_blocks + 1) * BLOCK_TOKENS
        return self.find_key(stop) if stop <= self.num_computed else None

    def find_key(self, position: int) -> bytes | None:
        """The prefix key at a block boundary of the prompt; None beyond the keys the ingress sent."""
        index = position // BLOCK_TOKENS - 1
        return self.prefix_keys[index] if 0 <= index < len(self.prefix_keys) else None
