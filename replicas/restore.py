"""Owns how a prefix on the host gets into a slot and the blocks of a sequence. Knows not where it came from."""

from warmstate.models.backend import BLOCK_TOKENS, ModelBackend
from warmstate.replicas.sequence import LoadedPrefix, Sequence


def restore_prefix(backend: ModelBackend, sequence: Sequence, slot: int, prefix: LoadedPrefix) -> None:
    """Writes the state, and the KV beyond the blocks that the sequence shares."""
    resident = sequence.num_shared_blocks * BLOCK_TOKENS
    for span in prefix.spans:
        start = max(span.start, resident)
        if start < span.stop:
            source = span.kv[:, :, :, start - span.start :].contiguous()
            backend.write_kv(sequence.block_table, start, span.stop, source)
    backend.write_state(slot, prefix.state)
