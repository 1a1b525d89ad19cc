"""Owns the facts that make two replicas' states interchangeable. The caller hashes them to a namespace."""

import hashlib
import struct
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import torch

from warmstate.models.checkpoints.checkpoint import CheckpointIndex, TensorEntry, read_index
from warmstate.models.errors import CheckpointError

STATE_LAYOUT_VERSION = b"1"
"""Raise it whenever the canonical layout of `backend.py` or the meaning of a stored part changes."""

MAX_SAMPLES = 4096
SAMPLE_BYTES = 4096

_FILES = ("config.json", "tokenizer.json")


def namespace_facts(path: Path, dtype: torch.dtype, deterministic: bool) -> dict[str, bytes]:
    """Named facts about the weights, config, tokenizer, dtypes, layout and numerics of a replica on the torch backend.

    Weights are known by index, shard sizes, header hashes and a page of data from each tensor (from `MAX_SAMPLES`
    evenly spread ones in a larger checkpoint): fine-tunes of one model differ in nothing but data. Equal facts mean
    states that can be exchanged; the path, rank layout, thread count and host name are no part of them.
    Raises `CheckpointError` like `read_index`.
    """
    return {
        "weights": _weights_digest(path),
        **{name: _file_digest(path / name) for name in _FILES},
        "dtype": str(dtype).encode(),
        "state_layout": STATE_LAYOUT_VERSION,
        "backend": b"cpu-torch",
        "torch": torch.__version__.encode(),
        "isa": torch.backends.cpu.get_cpu_capability().encode(),
        "deterministic": b"1" if deterministic else b"0",
    }


def _weights_digest(path: Path) -> bytes:
    index = read_index(path)
    digest = hashlib.sha256()
    for shard in index.shards:
        digest.update(struct.pack("<QQ", len(shard.name), shard.num_bytes) + shard.name.encode() + shard.header_digest)
    for name, entry in sorted(index.tensors.items()):
        digest.update(f"{len(name)}:{name}={entry.file}@{entry.start}\n".encode())
    for sample in _samples(index):
        digest.update(sample)
    return digest.digest()


def _samples(index: CheckpointIndex) -> Iterator[bytes]:
    """The middle page of tensors, in order of their place in the files."""
    entries = sorted(index.tensors.values())
    stride = -(-len(entries) // MAX_SAMPLES) or 1
    for name, places in groupby(entries[::stride], key=lambda entry: entry.file):
        with (index.directory / name).open("rb") as file:
            for entry in places:
                yield _sample(file, entry)


def _sample(file: BinaryIO, entry: TensorEntry) -> bytes:
    length = min(entry.num_bytes, SAMPLE_BYTES)
    file.seek(entry.start + (entry.num_bytes - length) // 2)
    return file.read(length)


def _file_digest(file: Path) -> bytes:
    try:
        return hashlib.sha256(file.read_bytes()).digest()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
