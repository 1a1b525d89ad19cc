"""Owns the figures of the device tier: what of the KV blocks and slots is in use. Its budget is fixed at start."""

from warmstate.models.backend import BLOCK_TOKENS, StateShapes
from warmstate.replicas.cache.state_codec import state_bytes
from warmstate.replicas.kv_blocks import BlockPool
from warmstate.replicas.slots import SlotPool


def device_stats(shapes: StateShapes, blocks: BlockPool, slots: SlotPool) -> dict[str, float]:
    """Bytes in the canonical layout. KV counts as used while a running sequence holds it, as resident while a later
    one can find it."""
    slot_bytes = state_bytes(shapes, 0)
    block_bytes = state_bytes(shapes, BLOCK_TOKENS) - slot_bytes
    figures = {
        "kv_bytes": (blocks.capacity - blocks.num_free) * block_bytes,
        "kv_resident_bytes": blocks.num_resident * block_bytes,
        "kv_budget_bytes": blocks.capacity * block_bytes,
        "state_bytes": (slots.num_slots - slots.num_free) * slot_bytes,
        "state_budget_bytes": slots.num_slots * slot_bytes,
    }
    return {f"device_{name}": float(value) for name, value in figures.items()}
