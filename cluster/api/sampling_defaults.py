"""Owns a request's sampling settings: the request before the model's generation_config.json before neutral."""

import dataclasses

from warmstate.cluster.api.openai_api import GenerationBody
from warmstate.cluster.errors import InvalidRequest
from warmstate.cluster.model_card import ModelCard
from warmstate.replicas.messages import SamplingParams

GREEDY_BELOW = 1e-5
"""A smaller temperature is greedy: dividing logits by it would overflow."""

_NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def sampling_params(
    body: GenerationBody, card: ModelCard, num_prompt_tokens: int, default_max_tokens: int | None = None
) -> SamplingParams:
    """Settings for one prompt; raises `InvalidRequest` where body and model contradict each other.

    `default_max_tokens` None means all that is left of the context.
    """
    max_tokens = _max_tokens(body, card, num_prompt_tokens, default_max_tokens)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: {min_tokens} is more than max_tokens, {max_tokens}", param="min_tokens")
    chosen = {name: _chosen(name, body, card) for name in _NEUTRAL}
    temperature = float(chosen["temperature"])
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=_top_k(int(chosen["top_k"]), card),
        top_p=float(chosen["top_p"]),
        min_p=float(chosen["min_p"]),
        presence_penalty=float(chosen["presence_penalty"]),
        frequency_penalty=float(chosen["frequency_penalty"]),
        repetition_penalty=float(chosen["repetition_penalty"]),
        logit_bias=_logit_bias(body, card),
        seed=body.seed,
        stop_token_ids=_stop_token_ids(body, card),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.num_logprobs,
    )


def for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The settings of the n-th choice: a seeded request's choices differ, and differ the same way each time."""
    if params.seed is None or choice == 0:
        return params
    wrapped = (params.seed + choice + 2**63) % 2**64 - 2**63
    return dataclasses.replace(params, seed=wrapped)


def _chosen(name: str, body: GenerationBody, card: ModelCard) -> float:
    asked = getattr(body, name)
    return asked if asked is not None else card.default_sampling.get(name, _NEUTRAL[name])


def _max_tokens(body: GenerationBody, card: ModelCard, num_prompt_tokens: int, default: int | None) -> int:
    room = card.max_model_len - num_prompt_tokens
    asked = body.token_limit
    if room >= 1 and (asked is None or asked <= room):
        return asked or min(room, default or room)
    wanted = f"the prompt has {num_prompt_tokens}" + (f" and {asked} more are asked for" if asked else "")
    raise InvalidRequest(
        f"This model's maximum context length is {card.max_model_len} tokens, but {wanted}; shorten the prompt"
        f"{' or lower max_tokens' if asked else ', at least one token must be left to generate'}",
        param="max_tokens" if room >= 1 else body.prompt_field,
        code="context_length_exceeded",
    )


def _top_k(value: int, card: ModelCard) -> int:
    """Both -1 and 0 switch the filter off; more than the vocabulary is no filter either."""
    return value if 0 < value < card.vocab_size else 0


def _logit_bias(body: GenerationBody, card: ModelCard) -> dict[int, float]:
    bias = body.logit_bias or {}
    return {_token_id(key, card): value for key, value in bias.items()}


def _token_id(key: str, card: ModelCard) -> int:
    if key.isascii() and key.isdigit() and len(key) < 10 and int(key) < card.vocab_size:
        return int(key)
    raise InvalidRequest(
        f"logit_bias: {key[:40]!r} is not a token id; they go from 0 to {card.vocab_size - 1}", param="logit_bias"
    )


def _stop_token_ids(body: GenerationBody, card: ModelCard) -> frozenset[int]:
    ids = frozenset(body.stop_token_ids or ())
    for token_id in ids:
        if not 0 <= token_id < card.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids: {token_id} is not a token id; they go from 0 to {card.vocab_size - 1}",
                param="stop_token_ids",
            )
    return ids
