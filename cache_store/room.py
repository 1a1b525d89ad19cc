"""Owns how writers and the holder of the lease keep a store within its budget: a number of bytes on the payload server.

It says how much may still be put. Writers take from it before they put; the holder sets it by what the rows say, less
what was taken since it began to count. So the store holds more than its budget by no more than what is being put.

What finds no room is said, and the holder makes room for it, if it is at most half of the budget: else a large prefix
would never come in where as much room as it needs is never left. For a larger one nothing goes, as it would go in vain.
"""

import redis

from warmstate.cache_store.names import ROOM, WANTED_ROOM
from warmstate.cache_store.payload_stream import PayloadStream

_WANTED_FOR_S = 10


def want_room(stream: PayloadStream, num_bytes: int) -> None:
    """Asks the holder of the lease for room, of which the next writer may make use."""
    stream.send("SET", WANTED_ROOM, num_bytes, "EX", _WANTED_FOR_S)
    stream.read_reply()


def read_wanted(client: redis.Redis, budget_bytes: int) -> int:
    """The bytes for which there should be room now."""
    value = client.get(WANTED_ROOM)
    num_bytes = int(value) if isinstance(value, bytes) else 0
    return num_bytes if num_bytes <= budget_bytes // 2 else 0


def take_room(stream: PayloadStream, num_bytes: int, budget_bytes: int) -> bool:
    """Takes bytes that are about to be put; False, and nothing, where they would pass the budget.

    A server that knows no number yet is taken for empty: it has just begun.
    """
    stream.send("SET", ROOM, budget_bytes, "NX")
    stream.send("INCRBY", ROOM, -num_bytes)
    stream.read_reply()
    if stream.read_number() >= 0:
        return True
    give_room(stream, num_bytes)
    return False


def give_room(stream: PayloadStream, num_bytes: int) -> None:
    """Gives back what was not put."""
    stream.ask("INCRBY", ROOM, num_bytes)


def read_room(client: redis.Redis) -> int | None:
    """The bytes that may be put now; below 0 when there are more than may be. None before anybody has counted."""
    value = client.get(ROOM)
    return int(value) if isinstance(value, bytes) else None


def settle_room(client: redis.Redis, before: int | None, room_bytes: int) -> None:
    """Sets the number to what was counted; what writers took since it was `before`, as the count began, stays taken."""
    if before is None:
        client.set(ROOM, room_bytes, nx=True)
    elif room_bytes != before:
        client.incrby(ROOM, room_bytes - before)
