"""Owns which prefixes this replica has been asked for lately, kept or not. Knows keys only, no state and no tokens."""

from collections import OrderedDict
from collections.abc import Sequence

from warmstate.cache_store.keys import BLOCK_TOKENS

MAX_SEEN_BLOCKS = 100_000
"""About 20 MB of keys, for 6.4 million tokens."""


class SeenPrefixes:
    """A bounded set of prefix keys, the least recently seen going first.

    A key is never newer than those before it on its path. So a path is forgotten from its end, and what is left of it
    is always a beginning.
    """

    def __init__(self, max_blocks: int = MAX_SEEN_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def count(self, keys: Sequence[bytes]) -> int:
        """How many tokens of the path `keys`, one key per block, were seen before."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in self._keys:
                low = middle
            else:
                high = middle - 1
        return low * BLOCK_TOKENS

    def put(self, keys: Sequence[bytes]) -> None:
        """Remembers a path."""
        for key in reversed(keys[: self._max_blocks]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_blocks:
            self._keys.popitem(last=False)
