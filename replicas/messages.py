"""What crosses between the ingress and a replica: plain, picklable data. Token ids only; text never gets here."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Neutral defaults; the ingress fills in request > generation_config > neutral.

    temperature 0 is greedy. top_k 0 and top_p 1 and min_p 0 switch those filters off. `logprobs` is the number of
    alternatives reported beside each chosen token (0 reports the chosen one alone, None reports nothing).
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None


class CheckpointKind(StrEnum):
    """Why a position is worth a checkpoint. The first four are marks that a renderer or a client sets."""

    SYSTEM = "system"
    """The end of system + tools."""
    TURN = "turn"
    """The start of the last generation prompt, or of the message that is continued."""
    LOOP = "loop"
    """While tool results are answered: what is left of the prompt when the user speaks next."""
    HINT = "hint"
    """The client asked for it."""
    END = "end"
    """The last boundary of a prompt without turns."""
    BRANCH = "branch"
    """Where this prompt leaves one that was seen before."""
    OUTPUT = "output"
    """The last boundary of the output."""
    SAFETY = "safety"
    """A power of two on a long path, for whatever the others miss."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A token position, unfloored, that is worth a checkpoint."""

    kind: CheckpointKind
    position: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue.

    `prompt_keys` are the 32-byte prefix keys of the prompt's whole blocks, concatenated, and `chain_root` the key of
    the empty prefix (both from `cache_store.keys`, salt already mixed in). `marks` are the positions worth a checkpoint
    that the renderer and the client know.
    `num_output_tokens` is not 0 when a stream goes on after its replica was lost: the last so many of `token_ids` were
    generated before, and count as output for penalties, min_tokens and the seed (but not for `max_tokens`, which is
    what is left).
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    chain_root: bytes
    prompt_keys: bytes
    marks: tuple[Mark, ...] = ()
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """First item of a reply: the request is queued on this replica."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """First and only item of a reply that was not accepted; `status` is the HTTP status for the client."""

    status: int
    message: str
    retry_after_s: int | None = None


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words; ABORT and ERROR never reach a client as a finish_reason."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


CacheSource = Literal["none", "device", "host", "store"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the chosen token and of the most likely alternatives, before any filter."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one engine step added to one sequence.

    `token_ids` holds the new tokens, a stop token included. `num_cached_tokens` is set on the first delta and is the
    prefix that was restored rather than computed. A failed request ends with `finish_reason` ERROR and `error`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    cache_source: CacheSource = "none"
    error: str | None = None


Reply = Accepted | Refused | TokenDelta
"""A reply is one `Accepted` and then deltas up to one with a finish_reason, or one `Refused`."""


@dataclass(frozen=True, slots=True)
class ReplicaPhase:
    """Where start-up stands: phase "loading" | "warming" | "ready" | "failed", with the fraction done in [0, 1]."""

    phase: Literal["loading", "warming", "ready", "failed"]
    fraction: float
    detail: str = ""
