"""What the keeper lets through: finite states, however large; never one with a NaN or an infinity anywhere."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmstate.models.backend import SequenceState
from warmstate.replicas.cache.copying import CopyNow
from warmstate.replicas.cache.host_tier import HostTier
from warmstate.replicas.cache.keeper import CheckpointKeeper
from warmstate.replicas.cache.state_codec import CheckpointNames
from warmstate.replicas.config import CacheConfig
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.messages import CheckpointKind
from warmstate.replicas.sequence import Sequence

LARGEST = torch.finfo(torch.float32).max


def new_keeper(
    backend: Any, host: HostTier, blocks: BlockPool, link: Any = None, copier: Any = None
) -> CheckpointKeeper:
    names = CheckpointNames(bytes(32), backend.shapes.num_head_groups)
    return CheckpointKeeper(backend, blocks, host, names, link, CacheConfig(), copier or CopyNow(), lambda work: work())


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("part", ["rec", "conv"])
@pytest.mark.parametrize("others", [0.0, 3e38])
def test_only_finite_states_are_kept(
    fake_backend: Callable[..., Any],
    request_for: Callable[..., Any],
    prompt_of: Callable[..., Any],
    value: float,
    part: str,
    others: float,
) -> None:
    backend = fake_backend()
    shapes = backend.shapes
    names = CheckpointNames(bytes(32), shapes.num_head_groups)
    blocks = BlockPool(8)
    keeper = new_keeper(backend, HostTier(shapes, names, 1 << 20, lambda *_: None), blocks)
    sequence = Sequence(request_for(prompt_of(257)), 0, 1024)
    rec, conv = torch.full(shapes.rec_shape(), others), torch.full(shapes.conv_shape(), others, dtype=shapes.dtype)
    (rec if part == "rec" else conv).view(-1)[-1] = value
    sequence.block_table = blocks.take_free(4)
    backend.write_kv(sequence.block_table, 0, 256, torch.zeros(shapes.kv_shape(256), dtype=shapes.dtype))
    kept = keeper.keep(sequence, SequenceState(256, rec, conv), CheckpointKind.END)
    assert kept == math.isfinite(value)


@pytest.mark.parametrize("has_link", [False, True])
def test_nothing_is_copied_for_what_neither_memory_nor_store_would_take(
    fake_backend: type[Any],
    request_for: Callable[..., Any],
    prompt_of: Callable[..., Any],
    sharing: Any,
    has_link: bool,
) -> None:
    class Unread(fake_backend):  # type: ignore[misc]
        def read_kv(self, *args: object) -> None:
            raise AssertionError("KV was copied for nobody")

    backend = Unread()
    shapes = backend.shapes
    names = CheckpointNames(bytes(32), shapes.num_head_groups)
    link = sharing.link(backend, max_publish_bytes=64) if has_link else None
    host = HostTier(shapes, names, 64, lambda *_: None)
    keeper = new_keeper(backend, host, BlockPool(8), link)
    sequence = Sequence(request_for(prompt_of(257)), 0, 1024)
    rec, conv = torch.zeros(shapes.rec_shape()), torch.zeros(shapes.conv_shape(), dtype=shapes.dtype)
    assert keeper.keep(sequence, SequenceState(256, rec, conv), CheckpointKind.END)
    assert host.stats()["refused"] == 1
    assert sum(keeper.stats().values()) == 0
    if link is not None:
        assert link.stats()["publish_dropped_no_room"] == 1
    rec.view(-1)[-1] = math.nan
    assert not keeper.keep(sequence, SequenceState(256, rec, conv), CheckpointKind.END)
