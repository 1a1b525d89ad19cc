"""Owns which checkpoints lie on whose path, and which KV segments they need. Plain data; knows no bytes and no store.

A node is a block boundary of some checkpoint's path, named by its prefix key. It lives as long as a checkpoint at it or
below it, so a segment whose node is gone is one that no checkpoint can use.
"""

from collections.abc import Iterator, Sequence


class PathNode:
    """One boundary. `kv_bytes` is None where it ends no segment that is here; `needs_kv` says that it ends one."""

    __slots__ = ("checkpoint", "children", "key", "kv_bytes", "needs_kv", "parent")

    def __init__(self, key: bytes, parent: "PathNode | None") -> None:
        self.key = key
        self.parent = parent
        self.children: set[PathNode] = set()
        self.checkpoint: PathCheckpoint | None = None
        self.needs_kv = False
        self.kv_bytes: int | None = None

    def lineage(self) -> "Iterator[PathNode]":
        """This node and those above it, the deepest first."""
        node: PathNode | None = self
        while node is not None:
            yield node
            node = node.parent


class PathCheckpoint:
    """A checkpoint as the eviction policy sees it; `is_here` is false while its room is only reserved."""

    __slots__ = (
        "base", "hits", "is_here", "is_whole", "key", "kind", "last_use_s", "ms_per_token", "node", "num_bytes",
        "position", "version",
    )  # fmt: skip

    def __init__(self, key: bytes, position: int, num_bytes: int, kind: str, node: PathNode) -> None:
        self.key = key
        self.position = position
        self.num_bytes = num_bytes
        self.kind = kind
        self.node = node
        self.hits = 1.0
        self.last_use_s = 0.0
        self.base = 0.0
        self.ms_per_token = 1.0
        self.version = 0
        self.is_here = False
        self.is_whole = False

    def find_parent(self) -> "PathCheckpoint | None":
        """The next shallower checkpoint that is here, on the same path."""
        for node in self.node.lineage():
            above = node.checkpoint
            if above is not None and above is not self and above.is_here:
                return above
        return None

    def has_all_kv(self) -> bool:
        return all(node.kv_bytes is not None for node in self.node.lineage() if node.needs_kv)


def checkpoints_below(start: PathNode) -> list[PathCheckpoint]:
    """Those that are here at `start` and below."""
    found: list[PathCheckpoint] = []
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node.checkpoint is not None and node.checkpoint.is_here:
            found.append(node.checkpoint)
        waiting.extend(node.children)
    return found


class PathTree:
    """All paths of the checkpoints known, shared where their prefixes are."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, PathNode] = {}

    def find(self, key: bytes) -> PathNode | None:
        return self._nodes.get(key)

    def grow(self, path: Sequence[bytes], segments: Sequence[bytes]) -> PathNode:
        """The node of the last key of `path`, made with all above it; `segments` are those of them that end one.

        Another path may have come to a node of this one without knowing all that lies above it.
        """
        known = len(path)
        while known > 0 and path[known - 1] not in self._nodes:
            known -= 1
        node = self._nodes[path[known - 1]] if known else None
        for key in path[known:]:
            child = self._nodes[key] = PathNode(key, node)
            if node is not None:
                node.children.add(child)
            node = child
        if any(key not in self._nodes for key in segments):
            self._fill_gaps(path)
        for key in segments:
            self._nodes[key].needs_kv = True
        assert node is not None, "a path has at least the key of its checkpoint"
        return node

    def _fill_gaps(self, path: Sequence[bytes]) -> None:
        """Puts what is missing of `path`, whose last node is there, between its nodes."""
        below = self._nodes[path[-1]]
        for key in reversed(path[:-1]):
            above = self._nodes.get(key)
            if above is None:
                above = self._nodes[key] = PathNode(key, None)
                if below.parent is not None:
                    below.parent.children.discard(below)
                    below.parent.children.add(above)
                above.parent, below.parent = below.parent, above
                above.children.add(below)
            # Rows of a store may lie: no path may become a circle.
            elif below.parent is None and below not in above.lineage():
                below.parent = above
                above.children.add(below)
            below = above

    def prune(self, start: PathNode) -> list[PathNode]:
        """Removes `start` and those above it that nothing needs any more, and returns them, the deepest first."""
        pruned: list[PathNode] = []
        for node in start.lineage():
            if node.children or node.checkpoint is not None:
                break
            del self._nodes[node.key]
            if node.parent is not None:
                node.parent.children.discard(node)
            pruned.append(node)
        return pruned
