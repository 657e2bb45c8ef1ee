"""The index of a folder of weights is written whole, and read with its mistakes named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerate.base.errors import CheckpointError
from accelerate.weights.index import INDEX, make_folder, read_index, save_offload_index

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
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file cannot be a folder for weights"):
        make_folder(tmp_path / "file")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_offload_index({"a": RAW}, tmp_path / "none")
