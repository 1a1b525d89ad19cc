"""Owns which slot holds which sequence's live GDN state. Knows nothing of what a slot contains."""


class SlotPool:
    """Slots 0..num_slots-1; the lowest free one is handed out first. Contents never outlive a holder."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = sorted(range(num_slots), reverse=True)
        self._freed_since_step: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def take(self) -> int:
        """Hands out a slot; the caller resets or restores it before use and has checked `num_free`."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} was released twice"
        self._free.append(slot)
        self._free.sort(reverse=True)
        self._freed_since_step.append(slot)

    def take_freed(self) -> tuple[int, ...]:
        """The slots given up since the last call, for the next step plan."""
        freed, self._freed_since_step = tuple(self._freed_since_step), []
        return freed
