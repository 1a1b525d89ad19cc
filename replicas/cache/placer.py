"""Owns what is known of the prompts that arrive, and so where each is checkpointed. Engine thread only."""

from warmstate.models.backend import BLOCK_TOKENS
from warmstate.replicas.cache.host_tier import HostTier
from warmstate.replicas.cache.placement import (
    KnownPath,
    Placement,
    PlacementLimits,
    kinds_on_path,
    place_checkpoints,
)
from warmstate.replicas.cache.seen_prefixes import SeenPrefixes
from warmstate.replicas.cache.store_link import StoreLink
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.sequence import Sequence


class CheckpointPlacer:
    """Asks `placement` with what this replica has seen and holds, and what others have told of their prompts."""

    def __init__(self, blocks: BlockPool, host: HostTier, link: StoreLink | None, limits: PlacementLimits) -> None:
        self._blocks = blocks
        self._host = host
        self._link = link
        self._limits = limits
        self._seen = SeenPrefixes()

    def meet(self, sequence: Sequence) -> None:
        """Takes down how much of a prompt was known when it arrived: later its own blocks would be among them."""
        keys = sequence.prefix_keys
        stored = [*self._link.find_positions(keys), self._link.count_known(keys)] if self._link else []
        resident = self._blocks.count_resident(keys) * BLOCK_TOKENS
        sequence.num_known_tokens = max(self._seen.count(keys), resident, *stored)
        self._seen.put(keys)

    def part(self, sequence: Sequence) -> None:
        """Remembers a prompt with its answer."""
        self._seen.put(sequence.prefix_keys)

    def place(self, sequence: Sequence, start: int) -> tuple[Placement, ...]:
        """Chooses what is kept of a sequence that starts at `start`, and returns what of it its prompt gives."""
        on_path = kinds_on_path(self._host.checkpoints_on_path(sequence.prefix_keys[: start // BLOCK_TOKENS]))
        known = KnownPath(start, on_path, sequence.num_known_tokens)
        placements = place_checkpoints(sequence.num_prompt_tokens, sequence.request.marks, known, self._limits)
        sequence.placements = tuple(p for p in placements if sequence.find_key(p.position) is not None)
        prompt_end = 0 if self._limits.max_prefill_splits is None else sequence.num_prompt_tokens
        deepest = max([prompt_end, start, *(p.position for p in sequence.placements)])
        sequence.output_from = deepest if sequence.has_all_keys else None
        return sequence.placements

    def stats(self) -> dict[str, float]:
        """What is remembered now."""
        return {"seen_prefix_blocks": float(len(self._seen))}
