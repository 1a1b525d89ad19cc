"""Owns the question whether a checkpoint directory can be served, answered from configs and file headers alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from warmstate.models.checkpoints.checkpoint import CheckpointIndex, TensorEntry, collector_paused, read_index
from warmstate.models.checkpoints.dialects import Dialect, log_skipped, probe_dialect
from warmstate.models.checkpoints.expected_tensors import expected_tensors
from warmstate.models.checkpoints.quantisation import SUPPORTED, refuse_quantised_config, refuse_quantised_tensors
from warmstate.models.checkpoints.special_tokens import token_ids
from warmstate.models.checkpoints.weight_reader import TORCH_DTYPES
from warmstate.models.config import ModelConfig, read_config
from warmstate.models.errors import CheckpointError, MissingFile, TensorMismatch, UnsupportedCheckpoint


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """What is known of a servable checkpoint before a weight is read. Sizes are of the text model only."""

    path: Path
    config: ModelConfig
    dialect: Dialect
    bytes_by_dtype: Mapping[str, int]
    num_parameters: int

    @property
    def total_bytes(self) -> int:
        """Bytes of weights on disk."""
        return sum(self.bytes_by_dtype.values())

    def loaded_bytes(self, itemsize: int) -> int:
        """Bytes of weights in memory in a dtype of `itemsize` bytes, on one rank."""
        return self.num_parameters * itemsize


@collector_paused()
def preflight(path: Path) -> CheckpointSummary:
    """Checks everything that can be known without reading weights: files, sizes, names, shapes, dtypes, tokenizer.

    Raises one `CheckpointError` that names the file and, where there is one, the tensor or the field.
    """
    if not path.is_dir():
        raise MissingFile(f"{path}: no such directory; expected a checkpoint in Hugging Face format")
    if (path / "adapter_config.json").exists():
        raise UnsupportedCheckpoint(
            f"{path / 'adapter_config.json'}: an adapter (LoRA) is not served; merge it into its base model"
        )
    config = read_config(path)
    refuse_quantised_config(path)
    index = read_index(path)
    refuse_quantised_tensors(index)
    dialect = probe_dialect(index, config)
    _check_tensors(index, config, dialect)
    _check_tokenizer(path, config)
    log_skipped(index, dialect)
    bytes_by_dtype: Counter[str] = Counter()
    for entry in dialect.tensors.values():
        bytes_by_dtype[entry.dtype] += entry.num_bytes
    return CheckpointSummary(
        path=path,
        config=config,
        dialect=dialect,
        bytes_by_dtype=dict(bytes_by_dtype),
        num_parameters=sum(entry.num_bytes // TORCH_DTYPES[entry.dtype].itemsize for entry in dialect.tensors.values()),
    )


def _check_tensors(index: CheckpointIndex, config: ModelConfig, dialect: Dialect) -> None:
    """Every expected tensor is there, once, in the right shape and a served dtype, and nothing is left over."""
    left_over = dict(dialect.tensors)
    missing = []
    for name, shape in expected_tensors(config, dialect):
        entry = left_over.pop(name, None)
        if entry is None:
            missing.append(name)
        else:
            _check_tensor(index.directory, dialect.disk_names[name], entry, shape)
    if missing:
        raise TensorMismatch(
            f"{index.directory}: {_listed('tensor', missing)} missing from {_files(index)} "
            "(names without the checkpoint's prefix); the download is incomplete or config.json is of another model"
        )
    if left_over:
        entry = next(iter(left_over.values()))
        names = [dialect.disk_names[name] for name in left_over]
        raise TensorMismatch(
            f"{index.directory / entry.file}: {_listed('tensor', names)} unexpected; "
            "config.json describes a model without"
        )


def _check_tensor(directory: Path, disk_name: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.dtype not in TORCH_DTYPES:
        raise UnsupportedCheckpoint(
            f"{directory / entry.file}: tensor {disk_name} has dtype {entry.dtype}; supported: {SUPPORTED}"
        )
    if entry.shape != shape:
        raise TensorMismatch(
            f"{directory / entry.file}: tensor {disk_name} has shape {list(entry.shape)}, "
            f"config.json asks for {list(shape)}"
        )


def _check_tokenizer(path: Path, config: ModelConfig) -> None:
    """Each token of tokenizer.json must have a row in the embedding."""
    file = path / "tokenizer.json"
    if not file.exists():
        raise MissingFile(f"{file}: no such file; the tokenizer of the model is needed (tokenizer.json)")
    ids = token_ids(file)
    if not ids:
        raise CheckpointError(f"{file}: the vocabulary is empty")
    token, highest = max(ids.items(), key=lambda item: item[1])
    if highest >= config.vocab_size:
        raise CheckpointError(f"{file}: token {token!r} has id {highest}, but vocab_size is {config.vocab_size}")


def _listed(noun: str, names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{noun} {shown} is" if len(names) == 1 else f"{len(names)} {noun}s ({shown}, ...) are"


def _files(index: CheckpointIndex) -> str:
    return index.shards[0].name if len(index.shards) == 1 else f"{len(index.shards)} files"
