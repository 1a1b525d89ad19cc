"""Owns token ids to text as they come, whole characters only. Knows no stop string and no HTTP."""

import codecs
from collections.abc import Sequence

from warmstate.cluster.text.tokenizer import Tokenizer

PRIMING_TOKENS = 4
"""A character has at most four bytes, and every token of a byte-level vocabulary at least one."""


class Detokenizer:
    """Turns one sequence's tokens into text in O(1) per token.

    The concatenation of all that `feed` and `flush` return is the text of all tokens decoded at once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A prompt of token ids may end inside a character; its bytes wait in the decoder, its text is not ours.
        for token_id in prompt_ids[-PRIMING_TOKENS:]:
            self._decoder.decode(tokenizer.token_bytes(int(token_id)))

    def feed(self, token_id: int) -> str:
        """The characters that this token completes; "" while the bytes so far end inside a character."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else ""."""
        return self._decoder.decode(b"", final=True)
