"""Owns the row each replica renews every second: who is alive, how far its start is, how it does. Knows no Ray."""

from collections.abc import Sequence
from typing import Annotated, cast

import redis
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from warmstate.cache_store.names import REPLICA_IDS, replica_row_name, snapshot_name
from warmstate.cache_store.redis_client import StoreAddress, open_client, translated_errors

ROW_TTL_MS = 5000
"""A replica that has not renewed its row for so long counts as dead."""

PREFILL_RATE = "prefill_tokens_per_s"
"""The figure in a row's `stats` that says what a prefix is worth; see `compute_costs.py`."""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """What a replica says of itself. `phase` is `replicas.messages.ReplicaPhase`'s; `namespace` is the hex digest."""

    replica_id: str
    epoch: int
    phase: str
    fraction: Annotated[float, Field(ge=0, le=1)]
    detail: str = ""
    namespace: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    stats: dict[str, float] = Field(default_factory=dict)


_ADAPTER = TypeAdapter(ReplicaRow)


class ReplicaRows:
    """Blocking reads and writes of the rows. Every method raises `StoreUnavailable` when the server does not answer."""

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._client: redis.Redis = open_client(address, max_connections=1)

    def write(self, row: ReplicaRow) -> None:
        """Writes or renews the row for `ROW_TTL_MS`."""
        with translated_errors(self._address):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.set(replica_row_name(row.replica_id), _ADAPTER.dump_json(row), px=ROW_TTL_MS)
            pipeline.sadd(REPLICA_IDS, row.replica_id)
            pipeline.execute()

    def read(self) -> dict[str, ReplicaRow]:
        """Rows of all replicas alive, by replica id. A row that cannot be read is left out: it is another version's."""
        with translated_errors(self._address):
            return read_rows(self._client)

    def delete(self, replica_id: str) -> None:
        """Takes the replica off the list at once, on its shutdown."""
        with translated_errors(self._address):
            self._client.unlink(replica_row_name(replica_id))
            self._client.unlink(snapshot_name(replica_id))
            _forget(self._client, [replica_id])

    def close(self) -> None:
        self._client.close()


def read_rows(client: redis.Redis) -> dict[str, ReplicaRow]:
    """As `ReplicaRows.read`; raises the client's errors."""
    members = cast(set[bytes], client.smembers(REPLICA_IDS))
    ids = sorted(replica_id for member in members if (replica_id := _text(member)) is not None)
    # Not MGET: on a cluster the rows lie in different slots.
    pipeline = client.pipeline(transaction=False)
    for replica_id in ids:
        pipeline.get(replica_row_name(replica_id))
    values = dict(zip(ids, pipeline.execute(), strict=True))
    strangers = [member for member in members if _text(member) is None]
    _forget(client, [*strangers, *(replica_id for replica_id, value in values.items() if value is None)])
    rows = {replica_id: _decode(value) for replica_id, value in values.items() if value is not None}
    return {replica_id: row for replica_id, row in rows.items() if row is not None}


def _forget(client: redis.Redis, replica_ids: Sequence[str | bytes]) -> None:
    """A replica that is forgotten by mistake is back with its next write."""
    if replica_ids:
        client.srem(REPLICA_IDS, *replica_ids)


def _decode(value: bytes) -> ReplicaRow | None:
    try:
        return _ADAPTER.validate_json(value)
    except ValidationError:
        return None


def _text(member: bytes) -> str | None:
    """None for what no replica can have written."""
    try:
        return member.decode()
    except UnicodeDecodeError:
        return None
