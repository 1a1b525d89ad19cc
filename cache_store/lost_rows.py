"""Owns the question which rows describe objects that the payload server does not hold; raises the client's errors."""

import redis

from warmstate.cache_store.index_editor import RowsOf
from warmstate.cache_store.names import IndexNames, checkpoint_names, segment_name


def objects_of(names: IndexNames, rows: RowsOf) -> list[str]:
    """The names of all objects that rows describe."""
    objects = [segment_name(names, key) for key in rows.segments]
    for key, row in rows.checkpoints.items():
        objects += checkpoint_names(names, key, row.num_groups)
    return objects


def find_lost(payload: redis.Redis, names: IndexNames, rows: RowsOf) -> RowsOf:
    """Those of which the server lacks an object."""
    objects = objects_of(names, rows)
    pipeline = payload.pipeline(transaction=False)
    for name in objects:
        pipeline.exists(name)
    missing = {name for name, exists in zip(objects, pipeline.execute(), strict=True) if not exists}
    checkpoints, segments = rows.checkpoints.items(), rows.segments.items()
    return RowsOf(
        {key: row for key, row in checkpoints if missing & {*checkpoint_names(names, key, row.num_groups)}},
        {key: row for key, row in segments if segment_name(names, key) in missing},
    )
