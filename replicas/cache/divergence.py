"""Owns the comparison of each prompt with the one before it on the same path. Knows no session: prompts say enough."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from warmstate.cache_store.keys import BLOCK_TOKENS

_MAX_BLOCKS = 65_536


@dataclass(frozen=True, slots=True)
class Divergence:
    """A prompt left the latest one that it shares a prefix with, in the block after `position`; that one had `num_lost`
    tokens more."""

    position: int
    num_lost: int


class PathEnds:
    """Remembers, bounded, how far the latest prompt through each block went."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._end_of: OrderedDict[bytes, int] = OrderedDict()

    def put(self, keys: Sequence[bytes]) -> Divergence | None:
        """Remembers the keys of a prompt's whole blocks. None when it goes on from an earlier one or shares nothing."""
        shared = next((index for index in range(len(keys), 0, -1) if keys[index - 1] in self._end_of), 0)
        end = self._end_of[keys[shared - 1]] if shared else 0
        for key in keys:
            self._end_of[key] = len(keys)
            self._end_of.move_to_end(key)
        while len(self._end_of) > self._max_blocks:
            self._end_of.popitem(last=False)
        # A prompt that is the beginning of an earlier one has not left it.
        if not shared or end <= shared or shared == len(keys):
            return None
        return Divergence(shared * BLOCK_TOKENS, (end - shared) * BLOCK_TOKENS)
