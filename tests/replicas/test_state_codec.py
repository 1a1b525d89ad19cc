"""State to named parts and back."""

import math

import pytest
import torch

from warmstate.cache_store.keys import chain_root, prefix_keys
from warmstate.cache_store.store import Part
from warmstate.models.backend import SequenceState, StateShapes
from warmstate.replicas.cache.state_codec import CheckpointBuffers, CheckpointNames, encode_checkpoint, state_bytes

SHAPES = [
    StateShapes(3, 4, 8, 5, 7, 4, 2, 2, 6, torch.bfloat16),
    StateShapes(2, 6, 12, 3, 3, 4, 1, 1, 4, torch.float32),
    StateShapes(2, 1, 3, 8, 4, 4, 1, 2, 4, torch.bfloat16),
]


def random_state(shapes: StateShapes, position: int) -> tuple[SequenceState, torch.Tensor | None]:
    state = SequenceState(position, torch.randn(shapes.rec_shape()), torch.randn(shapes.conv_shape()).to(shapes.dtype))
    tail = torch.randn(shapes.kv_shape(position % 256)).to(shapes.dtype) if position % 256 else None
    return state, tail


def copy_bytes(source: Part, target: Part) -> None:
    assert source.spec == target.spec
    target.data[:] = source.data


@pytest.mark.parametrize("shapes", SHAPES, ids=["4 groups", "2 groups", "1 group"])
@pytest.mark.parametrize("position", [64, 256, 320])
def test_a_state_comes_back_bit_for_bit(shapes: StateShapes, position: int) -> None:
    state, tail = random_state(shapes, position)
    groups = encode_checkpoint(shapes, state, tail)
    assert len(groups) == shapes.num_head_groups
    buffers = CheckpointBuffers(shapes, position)
    for group, parts in enumerate(groups):
        targets = buffers.parts(group)
        assert parts.keys() == targets.keys()
        for name, part in parts.items():
            copy_bytes(part, targets[name])
    back = buffers.state()
    assert back.position == position
    assert torch.equal(back.rec, state.rec)
    assert torch.equal(back.conv, state.conv)
    if tail is None:
        assert buffers.kv_tail is None
    else:
        assert buffers.kv_tail is not None
        assert torch.equal(buffers.kv_tail, tail)


def test_a_group_holds_the_q_k_and_v_channels_of_its_own_heads() -> None:
    shapes = StateShapes(1, 2, 2, 2, 3, 4, 1, 1, 2, torch.float32)
    conv = torch.arange(14, dtype=torch.float32).reshape(1, 14, 1).expand(1, 14, 3).contiguous()
    groups = encode_checkpoint(shapes, SequenceState(256, torch.zeros(shapes.rec_shape()), conv), None)
    second = torch.frombuffer(bytearray(groups[1]["conv"].data), dtype=torch.float32).reshape(7, 3)
    assert second[:, 0].tolist() == [2, 3, 6, 7, 11, 12, 13]


def test_state_bytes_counts_what_a_sequence_holds() -> None:
    shapes = SHAPES[0]
    state, _ = random_state(shapes, 64)
    kv = torch.empty(shapes.kv_shape(64), dtype=shapes.dtype)
    expected = sum(t.numel() * t.element_size() for t in (state.rec, state.conv, kv))
    assert state_bytes(shapes, 64) == expected
    assert state_bytes(shapes, 0) == expected - math.prod(kv.shape) * 2


def test_objects_are_named_by_the_key_at_their_end() -> None:
    keys = prefix_keys(list(range(512)), chain_root())
    names = CheckpointNames(bytes(32), 2)
    assert names.segment(keys, 256).prefix == keys[3]
    assert [key.group for key in names.checkpoint(keys[4], 320)] == [0, 1]
