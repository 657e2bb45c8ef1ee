"""The index of a folder of weights is written whole, and read with its mistakes named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import CheckpointError
from accelerate.weights import INDEX, make_folder, read_index, read_weight_map, save_offload_index

RAW = {"dtype": "float32", "shape": [2]}
MAPPED = {"safetensors_file": "model.safetensors", "weight_name": "a"}


def test_entries_are_added(tmp_path: Path) -> None:
    save_offload_index({}, tmp_path)
    assert not list(tmp_path.iterdir())
    save_offload_index({"a": RAW, "b": RAW}, tmp_path)
    save_offload_index({"b": MAPPED}, tmp_path)
    assert read_index(tmp_path / INDEX) == {"a": RAW, "b": MAPPED}
    assert [path.name for path in tmp_path.iterdir()] == [INDEX]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "cannot be read"),
        ("[1]", "no index of weights: it holds a list"),
        ("7", "no index of weights: it holds a int"),
        ({"a": RAW, "b": 3}, "damaged: b without"),
        ({"c": {"shape": [2]}}, "damaged: c without"),
        ({"c": {"dtype": 3, "shape": [2]}}, "damaged: c without"),
        ({"c": {"dtype": "float32", "shape": [-2]}}, "damaged: c without"),
        ({"c": {"dtype": "float32", "shape": "2"}}, "damaged: c without"),
        ({"c": {"safetensors_file": 3}}, "damaged: c without"),
        ({"c": {"safetensors_file": "a\0b"}}, "damaged: c without"),
        ({"../c": RAW}, "names the weight '../c', and the name of its file has a component '..'"),
        ({"/c": RAW}, "names the weight '/c', and the name of its file is an absolute path"),
        ({"c\0": RAW}, "its file contains a NUL character"),
        ("[" * 100_000, "cannot be read as an index"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, content: Any, named: str) -> None:
    path = tmp_path / INDEX
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=named) as caught:
        read_index(path)
    assert str(path) in str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    make_folder(tmp_path / "a" / "b")  # it may be there
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file cannot be a folder for weights"):
        make_folder(tmp_path / "file")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_offload_index({"a": RAW}, tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ([1], "holds no dictionary 'weight_map'"),
        ({}, "holds no dictionary 'weight_map'"),
        ({"weight_map": ["a"]}, "holds no dictionary 'weight_map'"),
        ({"weight_map": None}, "holds no dictionary 'weight_map'"),
        ({"metadata": {}, "a": "b"}, "'metadata' is stored in {}, which is not text but of type dict"),
        ({"a": "../b"}, r"'a' is stored in '\.\./b', which has a component '\.\.'"),
        ({"a": "/etc/passwd"}, "which is an absolute path"),
        ({"weight_map": {"a": 3}}, "'a' is stored in 3, which is not text but of type int"),
        ({"weight_map": {"a": ["b"]}}, "which is not text but of type list"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'a' is stored in '/etc/passwd', which is an absolute path"),
        ({"weight_map": {"a": "../b"}}, r"'a' is stored in '\.\./b', which has a component '\.\.'"),
        ({"weight_map": {"a": "b\0"}}, "which contains a NUL character"),
    ],
)
def test_a_weight_map_with_files_outside_its_folder_is_refused(
    tmp_path: Path, content: Any, named: str
) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=named) as caught:
        read_weight_map(path)
    assert str(path) in str(caught.value)


def test_a_weight_map_names_files_of_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "x/b.bin"}}))
    assert read_weight_map(path) == {"a": "a.safetensors", "b": "x/b.bin"}
    path.write_text(json.dumps({"a": "a.safetensors", "b": "x/b.bin"}))
    assert read_weight_map(path) == {"a": "a.safetensors", "b": "x/b.bin"}
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_weight_map(tmp_path / "none.index.json")


def test_a_weight_in_a_file_may_have_its_own_name_and_dtype(tmp_path: Path) -> None:
    entry = {"safetensors_file": "model.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"a": entry}))
    assert read_index(tmp_path / INDEX) == {"a": entry}
