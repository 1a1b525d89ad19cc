"""Owns the choice of the next token of each row. Knows logits and sampling parameters; no model and no scheduler.

A row's token depends on its own logits, parameters and history alone: row-wise operations along the last dimension,
exact elementwise arithmetic, and randomness from a counter (seed, index of the output token).
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from warmstate.replicas.messages import SamplingParams, TokenLogprobs

_MASK_64 = (1 << 64) - 1
_NUCLEUS_CANDIDATES = 512
_GROUP = 32


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """What one row of logits needs: parameters, a seed, and the history that penalties look at.

    `prompt_token_ids` and `output_token_ids` are read only where a penalty is set; `num_output_tokens` counts what was
    generated before this token, also elsewhere. `stop_ids` are the tokens that `min_tokens` holds back.
    """

    params: SamplingParams
    seed: int
    num_output_tokens: int
    prompt_token_ids: npt.NDArray[np.int32]
    output_token_ids: npt.NDArray[np.int32]
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The chosen token, with log-probabilities where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def draw_seed() -> int:
    """A fresh 64-bit seed for a request that named none."""
    return secrets.randbits(64)


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of output token `index` under `seed`: Philox, a counter-based generator."""
    return float(np.random.Generator(np.random.Philox(key=seed & _MASK_64, counter=index)).random())


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Which rows of `logits` [rows, vocab] are free of NaN and Inf.

    NaN and Inf survive a sum, which costs a fraction of looking at each; an overflow is looked into.
    """
    return [
        math.isfinite(total) or bool(torch.isfinite(logits[i]).all()) for i, total in enumerate(logits.sum(1).tolist())
    ]


def sample(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[SampledToken]:
    """Chooses one token per row of `logits`, float32 [rows, vocab], which stays as it is."""
    adjusted = _adjust(logits, rows)
    token_ids = torch.argmax(adjusted, dim=1).tolist()
    for i, row in enumerate(rows):
        if row.params.temperature > 0:
            token_ids[i] = _draw(adjusted[i], row)
    logprobs = _logprobs(logits, rows, token_ids)
    return [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]


def _adjust(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> torch.Tensor:
    """Penalties, bias and held-back stop tokens; returns `logits` itself where no row asks for any."""
    touched = [i for i, row in enumerate(rows) if _is_adjusted(row)]
    if not touched:
        return logits
    adjusted = logits.clone()
    for i in touched:
        _adjust_row(adjusted[i], rows[i])
    return adjusted


def _is_adjusted(row: SamplerRow) -> bool:
    params = row.params
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or row.num_output_tokens < params.min_tokens
    )


def _adjust_row(logits: torch.Tensor, row: SamplerRow) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.concatenate([row.prompt_token_ids, row.output_token_ids]))).long()
        values = logits[seen]
        scaled = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        logits[seen] = scaled
    if (params.presence_penalty or params.frequency_penalty) and len(row.output_token_ids):
        ids, counts = np.unique(row.output_token_ids, return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        logits[torch.from_numpy(ids).long()] -= torch.from_numpy(penalty).float()
    if params.logit_bias:
        biased = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < len(logits)}
        logits[list(biased)] += torch.tensor(list(biased.values()), dtype=torch.float32)
    if row.num_output_tokens < params.min_tokens:
        logits[[token for token in row.stop_ids if 0 <= token < len(logits)]] = -math.inf


def _draw(logits: torch.Tensor, row: SamplerRow) -> int:
    """Temperature, top-k, min-p and top-p over one row [vocab], then inverts the cumulative distribution."""
    params = row.params
    scaled = logits / params.temperature
    token_ids: torch.Tensor | None = None
    if 0 < params.top_k < len(scaled):
        scaled, token_ids = _top(scaled, params.top_k)
    probabilities = torch.softmax(scaled, dim=0)
    if params.min_p > 0:
        probabilities = probabilities.where(probabilities >= params.min_p * probabilities.max(), 0.0)
        probabilities /= probabilities.sum()
    if params.top_p < 1.0:
        probabilities, order = _nucleus(probabilities, params.top_p)
        token_ids = order if token_ids is None else token_ids[order]
    cumulative = probabilities.double().cumsum(dim=0)
    target = uniform(row.seed, row.num_output_tokens) * float(cumulative[-1])
    index = min(int(torch.searchsorted(cumulative, target, right=True)), len(cumulative) - 1)
    return index if token_ids is None else int(token_ids[index])


def _nucleus(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest set of most likely entries whose probability reaches `top_p`, at least one, and their indices."""
    values, indices = _top(probabilities, _NUCLEUS_CANDIDATES)
    cumulative = values.double().cumsum(dim=0)
    if cumulative[-1] < top_p and len(values) < len(probabilities):
        values, indices = torch.sort(probabilities, descending=True, stable=True)
        cumulative = values.double().cumsum(dim=0)
    num_kept = int(torch.searchsorted(cumulative, top_p)) + 1
    return values[:num_kept], indices[:num_kept]


def _top(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of `values` [n], descending, and their indices.

    All of them lie in the `count` groups with the largest maxima, and finding those first is about ten times faster
    than `torch.topk` over a whole vocabulary.
    """
    num_groups = len(values) // _GROUP
    if count * 4 >= num_groups:
        top = torch.topk(values, min(count, len(values)))
        return top.values, top.indices
    grouped = num_groups * _GROUP
    groups = torch.topk(values[:grouped].view(num_groups, _GROUP).amax(dim=1), count).indices
    candidates = (groups[:, None] * _GROUP + torch.arange(_GROUP)).flatten()
    candidates = torch.cat([candidates, torch.arange(grouped, len(values))])
    top = torch.topk(values[candidates], count)
    return top.values, candidates[top.indices]


def _logprobs(logits: torch.Tensor, rows: Sequence[SamplerRow], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    """Log-softmax of the raw logits, for the rows that asked."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return {}
    logprobs = torch.log_softmax(logits[asked], dim=1)
    result: dict[int, TokenLogprobs] = {}
    for i, row_logprobs in zip(asked, logprobs, strict=True):
        values, indices = _top(row_logprobs, rows[i].params.logprobs or 0)
        pairs = tuple(zip(indices.tolist(), values.tolist(), strict=True))
        result[i] = TokenLogprobs(token_ids[i], float(row_logprobs[token_ids[i]]), pairs)
    return result
