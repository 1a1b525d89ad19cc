"""One request's way through the replicas: what the client has heard, and what is left to ask. Knows no Ray."""

import dataclasses

import numpy as np

from warmstate.cache_store.keys import BLOCK_TOKENS, KEY_BYTES, extend_chain
from warmstate.replicas.messages import Accepted, FinishReason, GenerateRequest, Refused, Reply, TokenDelta

RETRIED_STATUSES = frozenset({429, 503})
"""Refusals that speak of the replica and not of the request: another replica may take it."""


class Journey:
    """Turns the replies of several replicas into the one reply that the client sees.

    `avoided` are the replicas that refused or lost the request; `ended` says that the last reply has been shown.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._output: list[int] = []
        self._num_asked = 0
        self._accepted = False
        self._cached_tokens_shown = False
        self._refusal: Refused | None = None
        self.avoided: set[str] = set()
        self.ended = False

    @property
    def has_all_tokens(self) -> bool:
        """Whether the client has every token it asked for, so that nothing is left to ask."""
        return len(self._output) >= self._request.sampling.max_tokens

    def next_request(self) -> GenerateRequest:
        """The request as the next replica must see it: with the tokens that the client already has, and an id of its
        own, because a replica that seemed lost may still be at work on the last one."""
        self._num_asked += 1
        rest = continued(self._request, self._output) if self._output else self._request
        if self._num_asked == 1:
            return rest
        return dataclasses.replace(rest, request_id=f"{rest.request_id}.{self._num_asked}")

    def advance(self, sender: str, reply: Reply, may_retry: bool) -> tuple[Reply, ...]:
        """Takes in one reply; returns what the client should see of it."""
        if isinstance(reply, Refused):
            return self._refuse(sender, reply, may_retry)
        accepted = () if self._accepted else (Accepted(sender),)
        self._accepted = True
        return accepted if isinstance(reply, Accepted) else (*accepted, self._extend(reply))

    def _refuse(self, sender: str, refusal: Refused, may_retry: bool) -> tuple[Reply, ...]:
        self._refusal = refusal
        if may_retry and refusal.status in RETRIED_STATUSES:
            self.avoided.add(sender)
            return ()
        return (self.give_up(),)

    def _extend(self, delta: TokenDelta) -> TokenDelta:
        self._output.extend(delta.token_ids)
        self.ended = delta.finish_reason is not None
        if self._cached_tokens_shown and delta.num_cached_tokens is not None:
            delta = dataclasses.replace(delta, num_cached_tokens=None)
        self._cached_tokens_shown = self._cached_tokens_shown or delta.num_cached_tokens is not None
        return delta

    def give_up(self) -> Reply:
        """The last word when nobody can, or need, go on."""
        self.ended = True
        if self.has_all_tokens:
            return TokenDelta((), finish_reason=FinishReason.LENGTH)
        if self._accepted:
            reason = self._refusal.message if self._refusal is not None else "the replica was lost"
            return TokenDelta((), finish_reason=FinishReason.ERROR, error=f"{reason}; no other replica could go on")
        if self._refusal is not None:
            return self._refusal
        return Refused(503, "no replica is ready to take the request; try again", retry_after_s=1)


def continued(request: GenerateRequest, output: list[int]) -> GenerateRequest:
    """The request with `output` moved to the end of its prompt: the same answer, from there on."""
    tokens = np.concatenate([request.token_ids, np.asarray(output, dtype=np.int32)])
    keys = request.prompt_keys
    last = keys[-KEY_BYTES:] or request.chain_root
    for start in range(len(keys) // KEY_BYTES * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        last = extend_chain(last, tokens[start : start + BLOCK_TOKENS].astype(np.uint32))
        keys += last
    left = request.sampling.max_tokens - len(output)
    return dataclasses.replace(
        request,
        token_ids=tokens,
        sampling=dataclasses.replace(request.sampling, max_tokens=left),
        prompt_keys=keys,
        num_output_tokens=request.num_output_tokens + len(output),
    )
