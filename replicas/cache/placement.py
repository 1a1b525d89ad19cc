"""Owns the choice of the positions whose state is worth keeping. Pure; knows no engine, no cache and no load."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from warmstate.models.backend import floor_to_block
from warmstate.replicas.messages import CheckpointKind, Mark

FIRST_SAFETY_TOKENS = 1024
MAX_SAFETY_POSITIONS = 8

# The more valuable first.
_BY_VALUE = (
    CheckpointKind.TURN,
    CheckpointKind.SYSTEM,
    CheckpointKind.BRANCH,
    CheckpointKind.HINT,
    CheckpointKind.LOOP,
    CheckpointKind.END,
    CheckpointKind.OUTPUT,
    CheckpointKind.SAFETY,
)

# Others are sure to start there, so no cap drops them.
_SHARED = frozenset({CheckpointKind.SYSTEM, CheckpointKind.BRANCH})


@dataclass(frozen=True, slots=True)
class Placement:
    """A position to keep, a multiple of 64, and why."""

    position: int
    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class KnownPath:
    """What is known of a prompt's path before it is computed.

    It is computed from `start` on. `checkpoints` are those kept on the path already. The first `num_known_tokens` are
    those of a prompt that was seen before, whether or not anything of it is still usable.
    """

    start: int = 0
    checkpoints: tuple[Placement, ...] = ()
    num_known_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """`max_per_path` checkpoints stay on one path; `max_prefill_splits` of one prompt are all a backend can hand out
    (None: each boundary of a prefill costs nothing)."""

    max_per_path: int = 8
    max_prefill_splits: int | None = None


def last_usable_boundary(num_tokens: int) -> int:
    """The deepest boundary of `num_tokens` tokens that still leaves one token to compute; 0 when there is none."""
    return floor_to_block(max(num_tokens - 1, 0))


def place_checkpoints(
    num_prompt_tokens: int,
    marks: Sequence[Mark],
    path: KnownPath = KnownPath(),
    limits: PlacementLimits = PlacementLimits(),
) -> tuple[Placement, ...]:
    """Where to checkpoint a prompt, and why: sorted, distinct, multiples of 64 beyond `path.start`, each leaving at
    least one token of the prompt to compute.

    The choice depends on the prompt and on its path alone, never on how load cuts it into chunks. The end of the output
    is not among them: it is known only when the sequence ends.
    """
    deepest = last_usable_boundary(num_prompt_tokens)
    kinds: dict[int, CheckpointKind] = {}
    for wanted in _wanted(deepest, marks, path):
        position = min(floor_to_block(wanted.position), deepest)
        if position > path.start:
            kinds[position] = min(wanted.kind, kinds.get(position, wanted.kind), key=_naming_order)
    placements = [Placement(position, kind) for position, kind in sorted(kinds.items())]
    kept = [known for known in path.checkpoints if known.position not in kinds]
    surplus = surplus_checkpoints([*kept, *placements], limits.max_per_path)
    return _most_valuable([p for p in placements if p not in surplus], limits.max_prefill_splits)


def kinds_on_path(found: Sequence[tuple[int, str]]) -> tuple[Placement, ...]:
    """Checkpoints as a tier tells of them, (position, kind)."""
    return tuple(Placement(position, CheckpointKind(kind)) for position, kind in found)


def kind_of_mark(position: int, marks: Sequence[Mark]) -> CheckpointKind:
    """What a prompt with these marks calls a checkpoint that somebody else has kept at `position`."""
    kinds = [mark.kind for mark in marks if floor_to_block(mark.position) == position]
    return min(kinds, key=_naming_order, default=CheckpointKind.END)


def surplus_checkpoints(checkpoints: Sequence[Placement], max_per_path: int) -> tuple[Placement, ...]:
    """Which checkpoints of one path to drop so that `max_per_path` are left, the least valuable first.

    Forks that are shared and the deepest of each kind, the path's tail, always stay, even beyond the limit. Safety
    positions go first, then old tails, then old hints; the shallower before the deeper.
    """
    deepest = {c.kind: max(o.position for o in checkpoints if o.kind is c.kind) for c in checkpoints}
    droppable = [
        c
        for c in checkpoints
        if c.kind is CheckpointKind.SAFETY or (c.kind not in _SHARED and c.position < deepest[c.kind])
    ]
    num_surplus = max(len(checkpoints) - max_per_path, 0)
    return tuple(sorted(droppable, key=_drop_order)[:num_surplus])


def _wanted(deepest: int, marks: Sequence[Mark], path: KnownPath) -> Iterator[Placement]:
    yield from (Placement(mark.position, mark.kind) for mark in marks)
    if not any(mark.kind is CheckpointKind.TURN for mark in marks):
        yield Placement(deepest, CheckpointKind.END)
    branch = floor_to_block(path.num_known_tokens)
    # Where all of the prompt is known it does not branch, and its own end decides.
    if path.start < branch < deepest:
        yield Placement(branch, CheckpointKind.BRANCH)
    for power in range(MAX_SAFETY_POSITIONS):
        position = FIRST_SAFETY_TOKENS << power
        if position < deepest:
            yield Placement(position, CheckpointKind.SAFETY)


def _naming_order(kind: CheckpointKind) -> tuple[bool, int]:
    """A position that is wanted for several reasons is called by what keeps it longest."""
    return kind not in _SHARED, _BY_VALUE.index(kind)


def _most_valuable(placements: Sequence[Placement], limit: int | None) -> tuple[Placement, ...]:
    by_value = sorted(placements, key=lambda p: (_BY_VALUE.index(p.kind), -p.position))
    return tuple(sorted(by_value[:limit], key=lambda p: p.position))


def _drop_order(checkpoint: Placement) -> tuple[int, int]:
    ranks = {CheckpointKind.SAFETY: 0, CheckpointKind.HINT: 2}
    return ranks.get(checkpoint.kind, 1), checkpoint.position
