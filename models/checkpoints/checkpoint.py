"""Owns which tensor lies where in a checkpoint directory, from file headers alone. Knows no model."""

import gc
import hashlib
import json
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from warmstate.models.checkpoints.json_fields import JsonFields, read_json
from warmstate.models.errors import CheckpointError, MissingFile, TensorMismatch, TruncatedFile, UnsupportedCheckpoint

_log = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"

_DTYPES_OF_BITS = {
    64: ("F64", "I64", "U64", "C64"),
    32: ("F32", "I32", "U32"),
    16: ("F16", "BF16", "I16", "U16"),
    8: ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"),
    4: ("F4",),
}
DTYPE_BITS = {dtype: bits for bits, dtypes in _DTYPES_OF_BITS.items() for dtype in dtypes}

_MAX_HEADER_BYTES = 100 << 20
_OTHER_FORMATS = (".bin", ".gguf", ".pt", ".pth", ".ckpt")


class TensorEntry(NamedTuple):
    """Where one tensor lies: bytes [start, stop) of `file`, counted from the start of the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One weight file: its size and the SHA-256 of its header."""

    name: str
    num_bytes: int
    header_digest: bytes


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """Every tensor of a directory under the name it has on disk."""

    directory: Path
    shards: tuple[ShardFile, ...]
    tensors: Mapping[str, TensorEntry]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Halves the time of building 150 thousand entries, none garbage, that the collector would walk again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@collector_paused()
def read_index(directory: Path) -> CheckpointIndex:
    """Finds the weight files and reads their headers (8 bytes of length, then JSON); no tensor data is touched.

    model.safetensors.index.json decides tensor by tensor where it exists; otherwise every *.safetensors counts, but
    for `consolidated*` copies. Raises `MissingFile`, `TruncatedFile`, `TensorMismatch`, `UnsupportedCheckpoint`.
    """
    if not directory.is_dir():
        raise MissingFile(f"{directory}: no such directory")
    present = sorted(file.name for file in directory.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if (directory / INDEX_NAME).exists():
        return _read_indexed(directory, present)
    if not present:
        raise _no_weights(directory)
    shards: list[ShardFile] = []
    tensors: dict[str, TensorEntry] = {}
    for name in present:
        shard, entries = read_header(directory / name)
        shards.append(shard)
        for tensor, entry in entries.items():
            if tensor in tensors:
                raise TensorMismatch(
                    f"{directory / name}: tensor {tensor} is in {tensors[tensor].file} too; delete the file that does "
                    f"not belong here, or add {INDEX_NAME}"
                )
            tensors[tensor] = entry
    return CheckpointIndex(directory, tuple(shards), tensors)


def read_header(path: Path) -> tuple[ShardFile, dict[str, TensorEntry]]:
    """The tensors of one safetensors file; raises `TruncatedFile` where the file ends before its header says so."""
    try:
        size, header = path.stat().st_size, _read_header_bytes(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        content = json.loads(header)
        entries = {name: _entry(path.name, 8 + len(header), item) for name, item in content.items() if name[:2] != "__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not that of a safetensors file: {error!r}") from error
    for name, entry in entries.items():
        _check_extent(path, size, name, entry)
    end = max((entry.stop for entry in entries.values()), default=8 + len(header))
    if size > end:
        raise CheckpointError(f"{path}: {size - end} bytes after its last tensor; download the file again")
    return ShardFile(path.name, size, hashlib.sha256(header).digest()), entries


def _read_header_bytes(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or 8 + min(length, _MAX_HEADER_BYTES) > size:
            raise TruncatedFile(f"{path}: {size} bytes do not hold its header; download the file again")
        if length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: a header of {length} bytes; this is not a safetensors file")
        return file.read(length)


def _entry(file: str, data_start: int, item: Mapping[str, Any]) -> TensorEntry:
    dtype, shape, (start, stop) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    counts = (*shape, start, stop - start)
    if type(dtype) is not str or set(map(type, counts)) != {int} or min(counts) < 0:
        raise ValueError(f"impossible entry {item}")
    return TensorEntry(file, dtype, shape, data_start + start, data_start + stop)


def _check_extent(path: Path, size: int, name: str, entry: TensorEntry) -> None:
    if entry.stop > size:
        raise TruncatedFile(
            f"{path}: tensor {name} ends at byte {entry.stop}, the file at {size}; download the file again"
        )
    bits = DTYPE_BITS.get(entry.dtype, 0)
    for count in entry.shape:
        bits *= count
    if entry.dtype in DTYPE_BITS and 8 * entry.num_bytes != bits:
        raise CheckpointError(
            f"{path}: tensor {name}: {entry.num_bytes} bytes do not make {entry.dtype} {list(entry.shape)}"
        )


def _read_indexed(directory: Path, present: list[str]) -> CheckpointIndex:
    weight_map = _weight_map(directory / INDEX_NAME)
    listed = sorted(set(weight_map.values()))
    missing = [name for name in listed if name not in present]
    if missing:
        raise MissingFile(
            f"{directory}: {INDEX_NAME} names {len(missing)} file(s) that are not there: {', '.join(missing[:5])}"
        )
    headers = {name: read_header(directory / name) for name in listed}
    tensors = {}
    for tensor, name in weight_map.items():
        entry = headers[name][1].get(tensor)
        if entry is None:
            raise TensorMismatch(f"{directory / name}: tensor {tensor} is not in the file that {INDEX_NAME} names")
        tensors[tensor] = entry
    _check_unlisted(directory, [name for name in present if name not in headers])
    return CheckpointIndex(directory, tuple(shard for shard, _ in headers.values()), tensors)


def _weight_map(file: Path) -> dict[str, str]:
    """Tensor name -> file name; raises `CheckpointError` for anything but plain *.safetensors names."""
    fields = JsonFields(file, read_json(file)).child("weight_map")
    if fields is None or not fields.values:
        raise CheckpointError(f"{file}: weight_map is missing or empty")
    plain: set[str] = set()
    for tensor, name in fields.values.items():
        if type(name) is str and name in plain:
            continue
        if type(name) is not str or not name.endswith(".safetensors") or Path(name).name != name:
            raise fields.error(tensor, "expected the plain name of a .safetensors file beside the index", name)
        plain.add(name)
    return dict(fields.values)


def _check_unlisted(directory: Path, names: Iterable[str]) -> None:
    """A weight file that the index does not name is an error, but for what is known to be left beside one."""
    for name in names:
        if name == "model.safetensors":
            _log.warning("%s: %s and %s are both there; the index decides", directory, INDEX_NAME, name)
        elif not name.startswith(("mtp", "visual", "vision")):
            raise TensorMismatch(
                f"{directory / name}: a weight file that {INDEX_NAME} does not name; delete it or restore its index"
            )


def _no_weights(directory: Path) -> CheckpointError:
    others = sorted(file.name for file in directory.iterdir() if file.suffix in _OTHER_FORMATS)
    if others:
        return UnsupportedCheckpoint(f"{directory}: only safetensors weights are served, found {', '.join(others[:5])}")
    return MissingFile(f"{directory}: no *.safetensors file")
