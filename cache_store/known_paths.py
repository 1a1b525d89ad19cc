"""Owns which paths lead to what the shared store holds, so that whoever leaves one can tell where. Knows no server.

An index row names a checkpoint's own boundary only. The boundaries on the way to it are told in a short stream of their
own, each by the head of its prefix key. They are hints: a wrong one costs a checkpoint that nobody needs.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock

from warmstate.cache_store.keys import BLOCK_TOKENS

PATHS_MAX_ENTRIES = 2000
"""With at most 4 KiB of heads in each, the stream takes no more than about 10 MB."""

_HEAD_BYTES = 8
_MAX_HEADS = 512
_MAX_KNOWN = 100_000


def encode_path(keys: Sequence[bytes]) -> dict[str, bytes]:
    """The entry for a path of at least one prefix key; of a very long one every so-manieth, and always the last."""
    stride = -(-len(keys) // _MAX_HEADS)
    return {"b": b"".join(key[:_HEAD_BYTES] for key in reversed(keys[::-stride]))}


def decode_path(fields: Mapping[bytes, bytes]) -> list[bytes]:
    """The heads of the keys, the shallowest first; none for an entry of another form."""
    joined = fields.get(b"b", b"")
    if len(joined) % _HEAD_BYTES:
        return []
    return [joined[start : start + _HEAD_BYTES] for start in range(0, len(joined), _HEAD_BYTES)]


class KnownPaths:
    """A bounded set of heads, the least recently told going first. Thread-safe."""

    def __init__(self, max_known: int = _MAX_KNOWN) -> None:
        self._max_known = max_known
        self._lock = Lock()
        self._heads: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heads)

    def put(self, heads: Sequence[bytes]) -> None:
        """Takes in what `decode_path` gave."""
        with self._lock:
            for head in heads:
                self._heads[head] = None
                self._heads.move_to_end(head)
            while len(self._heads) > self._max_known:
                self._heads.popitem(last=False)

    def count(self, keys: Sequence[bytes]) -> int:
        """How many tokens of the path `keys`, one key per block, lie on a known one."""
        with self._lock:
            # The deepest decides: its key stands for all that came before it.
            for num_blocks in range(len(keys), 0, -1):
                if keys[num_blocks - 1][:_HEAD_BYTES] in self._heads:
                    return num_blocks * BLOCK_TOKENS
        return 0
