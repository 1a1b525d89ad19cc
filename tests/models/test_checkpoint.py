"""Which file a tensor is read from, and how a damaged directory is refused."""

import json
import logging
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from warmstate.models.checkpoints.checkpoint import INDEX_NAME, read_header, read_index
from warmstate.models.errors import CheckpointError, MissingFile, TensorMismatch, TruncatedFile, UnsupportedCheckpoint

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and an index: a in the first, b in the second, and a stale b in the first."""
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4)}, tmp_path / A)
    save_file({"b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / B)
    write_index(tmp_path, {"a": A, "b": B})
    return tmp_path


def write_index(path: Path, weight_map: object) -> None:
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    file = path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return file


def test_a_single_file_is_read_by_its_header(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    entry = read_index(tmp_path).tensors["a"]
    assert (entry.dtype, entry.shape, entry.num_bytes) == ("F32", (2, 3), 24)
    data = (tmp_path / "model.safetensors").read_bytes()[entry.start : entry.stop]
    assert struct.unpack("<6f", data) == (0, 1, 2, 3, 4, 5)


def test_the_index_decides_which_copy_of_a_tensor_counts(sharded: Path) -> None:
    index = read_index(sharded)
    assert index.tensors["b"].file == B
    assert index.tensors["b"].dtype == "BF16"
    assert [shard.name for shard in index.shards] == [A, B]


def test_a_tensor_the_index_does_not_name_is_not_there(sharded: Path) -> None:
    write_index(sharded, {"b": B, "a": A})
    save_file({"a": torch.zeros(1), "stale": torch.zeros(1)}, sharded / A)
    assert set(read_index(sharded).tensors) == {"a", "b"}


def test_files_without_an_index_are_united(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    save_file({"a": torch.zeros(2)}, sharded / A)
    save_file({"everything": torch.zeros(2)}, sharded / "consolidated.safetensors")
    assert {name: entry.file for name, entry in read_index(sharded).tensors.items()} == {"a": A, "b": B}


def test_one_name_in_two_files_without_an_index_is_an_error(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    with pytest.raises(TensorMismatch, match=rf"{B}: tensor b is in {A} too"):
        read_index(sharded)


def test_the_index_wins_over_a_whole_file_with_a_warning(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"a": torch.zeros(1)}, sharded / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert read_index(sharded).tensors["a"].file == A
    assert "the index decides" in caplog.text


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / B).unlink()
    with pytest.raises(MissingFile, match=rf"{INDEX_NAME} names 1 file\(s\) that are not there: {B}"):
        read_index(sharded)


def test_an_extra_shard_is_named(sharded: Path) -> None:
    save_file({"c": torch.zeros(1)}, sharded / "model-00003-of-00003.safetensors")
    with pytest.raises(TensorMismatch, match=r"model-00003-of-00003\.safetensors: a weight file that"):
        read_index(sharded)


def test_an_unlisted_mtp_file_is_left_alone(sharded: Path) -> None:
    save_file({"mtp.fc.weight": torch.zeros(1)}, sharded / "mtp.safetensors")
    assert set(read_index(sharded).tensors) == {"a", "b"}


def test_a_tensor_missing_from_its_shard_is_named(sharded: Path) -> None:
    write_index(sharded, {"a": A, "b": B, "c": B})
    with pytest.raises(TensorMismatch, match=rf"{B}: tensor c is not in the file"):
        read_index(sharded)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", 3, None])
def test_a_shard_name_that_leaves_the_directory_is_refused(sharded: Path, name: Any) -> None:
    write_index(sharded, {"a": name})
    with pytest.raises(CheckpointError, match=r"weight_map\.a: expected the plain name"):
        read_index(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_weight_map_is_refused(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=rf"{INDEX_NAME}: weight_map"):
        read_index(sharded)


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(64)}, tmp_path / "model.safetensors")
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(bytes(100))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: 100 bytes after its last tensor"):
        read_index(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 40])
def test_a_file_cut_inside_its_header_is_truncated(tmp_path: Path, keep: int) -> None:
    save_file({"a": torch.zeros(64)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:keep])
    with pytest.raises(TruncatedFile, match=r"model\.safetensors: "):
        read_index(tmp_path)


def test_a_file_cut_inside_its_data_names_the_tensor(sharded: Path) -> None:
    content = (sharded / B).read_bytes()
    (sharded / B).write_bytes(content[:-1])
    with pytest.raises(TruncatedFile, match=rf"{B}: tensor b ends at byte"):
        read_index(sharded)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"not json",
        b"\xff\xfe",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}}',
    ],
)
def test_a_header_that_makes_no_sense_is_one_error_naming_the_file(tmp_path: Path, header: bytes) -> None:
    write_raw(tmp_path, header, b"\0" * 64)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_index(tmp_path)


def test_an_absurd_header_length_is_refused_without_reading_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as out:
        out.write(struct.pack("<Q", 1 << 40))
        out.truncate(200 << 20)
    with pytest.raises(CheckpointError, match="this is not a safetensors file"):
        read_header(file)


def test_other_weight_formats_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedCheckpoint, match=r"only safetensors weights are served, found pytorch_model\.bin"):
        read_index(tmp_path)


def test_a_directory_without_weights_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"no \*\.safetensors file"):
        read_index(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(MissingFile, match="no such directory"):
        read_index(tmp_path)
