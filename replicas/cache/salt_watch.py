"""Owns the knowledge of which tokens were seen under which salt, for counting only. Knows no cache; never asked on a
request's path, and what it finds reaches nobody but the operator."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from warmstate.cache_store.keys import BLOCK_TOKENS, chain_root, prefix_keys

_MAX_BLOCKS = 65_536
_MAX_ROOTS = 2
_UNSALTED = chain_root()


class SaltWatch:
    """Remembers the unsalted chains of prompts, bounded, each block with the roots that it was last seen under.

    An unsalted prompt brings its unsalted chain along; only prompts with a salt are hashed a second time.
    """

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._roots_of: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()

    def put(self, root: bytes, keys: Sequence[bytes], token_ids: npt.NDArray[np.int32]) -> int:
        """Remembers a prompt; returns how many of its leading tokens were seen under another root before."""
        plain = keys if root == _UNSALTED else _unsalted_keys(token_ids, len(keys))
        num_known = 0
        for index, key in enumerate(plain):
            roots = self._roots_of.pop(key, ())
            others = tuple(other for other in roots if other != root)
            if others:
                num_known = (index + 1) * BLOCK_TOKENS
            self._roots_of[key] = (*others, root)[-_MAX_ROOTS:]
        while len(self._roots_of) > self._max_blocks:
            self._roots_of.popitem(last=False)
        return num_known

    def __len__(self) -> int:
        return len(self._roots_of)


def _unsalted_keys(token_ids: npt.NDArray[np.int32], num_blocks: int) -> list[bytes]:
    return prefix_keys(token_ids[: num_blocks * BLOCK_TOKENS].astype(np.uint32), _UNSALTED)
