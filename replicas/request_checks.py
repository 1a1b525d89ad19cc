"""Owns what a request must be before it is queued. Pure."""

import numpy as np

from warmstate.replicas.errors import InvalidRequest, PromptTooLong
from warmstate.replicas.messages import GenerateRequest


def check_request(request: GenerateRequest, context_limit: int, vocab_size: int) -> None:
    """Raises `InvalidRequest` or `PromptTooLong` for a prompt that cannot be served."""
    num_tokens = len(request.token_ids)
    if num_tokens + 1 > context_limit:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens, and at least one more must fit into the context of {context_limit}"
        )
    if num_tokens == 0:
        raise InvalidRequest("the prompt is empty")
    # As unsigned numbers the negative ones are beyond every vocabulary.
    if request.token_ids.view(np.uint32).max() >= vocab_size:
        raise InvalidRequest(f"the prompt has a token id outside the vocabulary of {vocab_size}")
