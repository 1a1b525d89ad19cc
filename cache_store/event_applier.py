"""Owns how events, rows and snapshots become rows of a `PrefixIndex`. Pure: knows no server and no thread."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from warmstate.cache_store.events import EventEntry
from warmstate.cache_store.prefix_index import STORE_HOLDER, IndexRow, PrefixIndex
from warmstate.cache_store.snapshots import Snapshot

_MAX_TOUCHED = 50_000


@dataclass(slots=True)
class _Replica:
    """The place of a replica's last entry. While entries before `complete_from` are missing, `touched` tells which keys
    later ones spoke of, and in which of them last."""

    epoch: int
    seq: int
    complete_from: int | None = None
    touched: dict[bytes, int] = field(default_factory=dict)


class EventApplier:
    """Applies the entries of one stream in order.

    Where a replica's entries show a gap, its rows are dropped until a snapshot stands in for the missing entries.
    Epochs of a replica must grow from one life to the next: entries of an older one than the newest are ignored.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._replicas: dict[str, _Replica] = {}
        self.num_gaps = 0

    def apply(self, entry: EventEntry) -> None:
        """Takes the next entry of the stream into the index; a repeated or outlived one changes nothing."""
        replica = self._advance(entry)
        if replica is None:
            return
        event = entry.event
        if event.op == "add":
            self._index.insert(event.key, entry.holder, IndexRow(event.position, event.tier))
        else:
            self._index.remove(event.key, entry.holder)
        if replica.complete_from is not None and not event.is_of_store:
            replica.touched[event.key] = entry.seq
            if len(replica.touched) > _MAX_TOUCHED:
                self._start_gap(entry.replica_id, replica, entry.seq + 1)

    def put_stored(self, positions: Mapping[bytes, int]) -> None:
        """Takes the rows of the store, as they stood before some of the entries that will be applied."""
        for key, position in positions.items():
            self._index.insert(key, STORE_HOLDER, IndexRow(position, "store"))

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Lets a snapshot stand in for what is missing; one that is too old for that changes nothing."""
        known = self._replicas.get(snapshot.replica_id)
        if known is None or known.epoch < snapshot.epoch:
            self._index.drop_holder(snapshot.replica_id)
            known = _Replica(snapshot.epoch, snapshot.next_seq - 1, complete_from=snapshot.next_seq)
            self._replicas[snapshot.replica_id] = known
        is_new_enough = known.complete_from is not None and snapshot.next_seq >= known.complete_from
        if known.epoch != snapshot.epoch or not is_new_enough:
            return
        # The snapshot may be ahead of the entries that were read: it also knows what was removed since.
        for key, seq in known.touched.items():
            if seq < snapshot.next_seq and key not in snapshot.rows:
                self._index.remove(key, snapshot.replica_id)
        for key, row in snapshot.rows.items():
            if known.touched.get(key, -1) < snapshot.next_seq:
                self._index.insert(key, snapshot.replica_id, row)
        known.seq = max(known.seq, snapshot.next_seq - 1)
        known.complete_from = None
        known.touched = {}

    def incomplete(self) -> list[str]:
        """The replicas that wait for a snapshot; from any thread."""
        replicas = list(self._replicas.items())
        return [replica_id for replica_id, replica in replicas if replica.complete_from is not None]

    def give_up(self, replica_ids: Iterable[str]) -> None:
        """These replicas will write no snapshot any more: what is known of them is all there is."""
        for replica_id in replica_ids:
            self._replicas[replica_id].complete_from = None
            self._replicas[replica_id].touched = {}

    def reset(self) -> None:
        """Forgets all that came from the stream. Not all of the index: other streams may feed it too."""
        for holder in (STORE_HOLDER, *self._replicas):
            self._index.drop_holder(holder)
        self._replicas.clear()

    def _advance(self, entry: EventEntry) -> _Replica | None:
        """The replica of an entry that is news, its place moved on; None for any other entry."""
        known = self._replicas.get(entry.replica_id)
        if known is not None and (entry.epoch, entry.seq) <= (known.epoch, known.seq):
            return None
        if known is None or entry.epoch > known.epoch:
            known = self._begin_life(entry)
        elif entry.seq != known.seq + 1:
            self.num_gaps += 1
            self._start_gap(entry.replica_id, known, entry.seq)
        known.seq = entry.seq
        return known

    def _begin_life(self, entry: EventEntry) -> _Replica:
        """An older life's rows are void. A first entry with a number above 0 means that the stream was trimmed."""
        self._index.drop_holder(entry.replica_id)
        replica = _Replica(entry.epoch, entry.seq, complete_from=entry.seq or None)
        self._replicas[entry.replica_id] = replica
        return replica

    def _start_gap(self, replica_id: str, replica: _Replica, complete_from: int) -> None:
        self._index.drop_holder(replica_id)
        replica.complete_from = complete_from
        replica.touched = {}
