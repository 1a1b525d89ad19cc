"""Owns the paged KV blocks of one backend: who holds each, and which prefix a full one contains. Knows no tensors."""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Reference-counted blocks 1..num_blocks-1; block 0 is never handed out.

    A block without holders keeps its contents, and its prefix key, until it is handed out again: least recently
    released first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._capacity = num_blocks - 1
        self._holders = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def num_free(self) -> int:
        """Blocks without a holder, resident prefixes included."""
        return len(self._free)

    @property
    def num_resident(self) -> int:
        """Blocks whose contents can be found by prefix key."""
        return len(self._key_of)

    def count_resident(self, keys: Sequence[bytes]) -> int:
        """How many leading keys have their block resident; `keys[i]` is the key after block i."""
        for count, key in enumerate(keys):
            if key not in self._block_of:
                return count
        return len(keys)

    def fits(self, num_blocks: int, shared_keys: Sequence[bytes] = (), spare: int = 0) -> bool:
        """Whether a table of `num_blocks`, the first of them resident under `shared_keys`, leaves `spare` blocks."""
        held = sum(self._holders[self._block_of[key]] > 0 for key in shared_keys)
        return num_blocks - held + spare <= self.num_free

    def take_resident(self, keys: Sequence[bytes]) -> list[int]:
        """Adds a holder to the blocks of `keys`, all of them resident."""
        blocks = [self._block_of[key] for key in keys]
        for block in blocks:
            self._holders[block] += 1
            self._free.pop(block, None)
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a holder to blocks that have one."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} may have new contents already"
            self._holders[block] += 1

    def take_free(self, count: int) -> list[int]:
        """Hands out blocks for new contents; what they contained can no longer be found. The caller checks `fits`."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.forget(block)
            self._holders[block] = 1
        return blocks

    def put_key(self, block: int, key: bytes) -> None:
        """Makes a full block findable, unless its prefix is resident already or it has a key."""
        if key not in self._block_of and block not in self._key_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def forget(self, block: int) -> None:
        """Makes a block's contents unfindable; its holders keep it."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one holder of each block; the tail of the table becomes available before its head."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} was released more often than taken"
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books contradict each other."""
        free = [block for block in range(1, len(self._holders)) if self._holders[block] == 0]
        assert sorted(self._free) == free, "free list and holder counts differ"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "keys and blocks differ"
        assert 0 not in self._free, "block 0 was handed out"
        assert self._holders[0] == 0, "block 0 has a holder"
