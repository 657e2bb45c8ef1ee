"""What is read of a checkpoint, and what is said when it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerate.base import CheckpointError, ConfigurationError
from accelerate.checkpointing import Load, nothing


def test_only_files_of_the_checkpoint_are_read(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "own.bin")
    torch.save({"a": 2}, tmp_path / "foreign.bin")
    load = Load(tmp_path, names={"own.bin", "gone.bin"})
    assert load.read("own.bin") == {"a": 1}
    assert not load.has("gone.bin")
    for name in ("foreign.bin", "gone.bin"):
        with pytest.raises(CheckpointError, match=rf"holds no {name}\. .*prepare the same ones"):
            load.read(name)
    assert Load(tmp_path).read("foreign.bin") == {"a": 2}


def test_arguments_of_torch_load_are_passed_on(tmp_path: Path) -> None:
    torch.save({"a": tmp_path}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"pathlib\.\w+"):
        Load(tmp_path).read("x.bin")
    assert Load(tmp_path, reading={"weights_only": False}).read("x.bin") == {"a": tmp_path}


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("shapes"), AttributeError("no")])
def test_whatever_does_not_fit_is_said_with_the_file(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(CheckpointError, match=rf"x\.bin does not fit this Adam: {type(error).__name__}"),
        Load(tmp_path).fitting("x.bin", "Adam"),
    ):
        raise error


def test_errors_that_say_so_themselves_stay(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="mine"), Load(tmp_path).fitting("x.bin", "Adam"):
        raise ConfigurationError("mine")


def test_nothing_changes_nothing() -> None:
    nothing()
