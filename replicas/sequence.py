"""Owns the state of one request inside the engine. Knows nothing of how it is scheduled, computed or cached."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from warmstate.cache_store.keys import extend_chain, split_keys
from warmstate.models.backend import BLOCK_TOKENS, SequenceState, floor_to_block
from warmstate.replicas.cache.fetch_miss import FetchMiss
from warmstate.replicas.cache.fetch_rule import FetchDecision
from warmstate.replicas.cache.placement import Placement
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
    """One request: its tokens, how many of them are computed, and the slot and blocks it holds while it runs.

    `prefix_keys` are those of all whole blocks of its tokens, output included. `num_known_tokens` of its prompt had
    been seen when it arrived. `placements` are where its prompt is checkpointed; beyond `output_from` (None: nowhere)
    the last boundary is handed out too, for the checkpoint at the end of the output. It `is_broken` once KV of it is
    known to hold a NaN or an infinity.
    """

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
    is_broken: bool = False
    twin_leader: int | None = None
    finish_reason: FinishReason | None = None
    num_known_tokens: int = 0
    placements: tuple[Placement, ...] = ()
    output_from: int | None = None
    prefix_keys: list[bytes] = field(init=False)
    _tokens: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        prompt = self.request.token_ids
        room = max(1, min(self.request.sampling.max_tokens, self.context_limit - len(prompt)))
        self._tokens = np.empty(len(prompt) + room, dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self.num_tokens = len(prompt)
        self.seed = draw_seed() if self.request.sampling.seed is None else self.request.sampling.seed
        self.prefix_keys = split_keys(self.request.prompt_keys)[: len(prompt) // BLOCK_TOKENS]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def has_all_keys(self) -> bool:
        """Whether its prompt came with its keys; otherwise it can share nothing."""
        return len(self.prefix_keys) >= self.num_prompt_tokens // BLOCK_TOKENS

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
        if self.num_tokens % BLOCK_TOKENS == 0 and self.has_all_keys:
            start = self.num_tokens - BLOCK_TOKENS
            last = self.prefix_keys[-1] if self.prefix_keys else self.request.chain_root
            self.prefix_keys.append(extend_chain(last, self._tokens[start : self.num_tokens].astype(np.uint32)))

    def positions_to_hand_out(self, start: int, stop: int) -> tuple[int, ...]:
        """The positions in (start, stop] whose state the step that computes these tokens must hand out."""
        positions = [p.position for p in self.placements if start < p.position <= stop]
        boundary = floor_to_block(stop)
        if self.output_from is not None and stop >= self.num_prompt_tokens and boundary > max(start, self.output_from):
            positions.append(boundary)
        return tuple(positions)

    def find_next_block_key(self) -> bytes | None:
        """The prefix key of the first computed block that has not been made findable; None when there is none."""
        stop = (self.num_keyed_blocks + 1) * BLOCK_TOKENS
        return self.find_key(stop) if stop <= self.num_computed else None

    def find_key(self, position: int) -> bytes | None:
        """The prefix key at a block boundary; None beyond the known tokens, or the keys that came with them."""
        index = position // BLOCK_TOKENS - 1
        return self.prefix_keys[index] if 0 <= index < len(self.prefix_keys) else None
