"""Owns how a checkpoint's weights are written: safetensors shards and their index, one shard in memory at a time."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from warmstate.models.checkpoints.checkpoint import INDEX_NAME


def write_shards(directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int) -> None:
    """Writes one model.safetensors, or numbered files and their index where one would pass `max_shard_bytes`."""
    weight_map: dict[str, int] = {}
    shard: dict[str, torch.Tensor] = {}
    num_shards = num_bytes = total_bytes = 0
    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > max_shard_bytes:
            _save(directory, num_shards, shard)
            shard, num_bytes, num_shards = {}, 0, num_shards + 1
        shard[name] = tensor
        weight_map[name] = num_shards
        num_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    _save(directory, num_shards, shard)
    _give_final_names(directory, num_shards + 1, weight_map, total_bytes)


def _save(directory: Path, number: int, shard: dict[str, torch.Tensor]) -> None:
    file = directory / f"part-{number}"
    save_file(shard, str(file), metadata={"format": "pt"})
    # safetensors makes files only their owner can read; a server often runs as somebody else.
    file.chmod(0o644)


def _give_final_names(directory: Path, count: int, weight_map: dict[str, int], total_bytes: int) -> None:
    """Only now is the count known that every name holds."""
    if count == 1:
        (directory / "part-0").rename(directory / "model.safetensors")
        return
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    for number, name in enumerate(names):
        (directory / f"part-{number}").rename(directory / name)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {tensor: names[number] for tensor, number in weight_map.items()},
    }
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
