"""What is read of a checkpoint, and what is said when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.base import CheckpointError, ConfigurationError, StateError
from accelerate.checkpointing import Change, Load, Stage, apply_all, nothing


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
def test_an_error_while_loading_names_the_file(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(CheckpointError, match=rf"x\.bin does not fit this Adam: {type(error).__name__}"),
        Load(tmp_path).fitting("x.bin", "Adam"),
    ):
        raise error


def test_errors_of_this_package_are_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="mine"), Load(tmp_path).fitting("x.bin", "Adam"):
        raise ConfigurationError("mine")


def raise_failure(failure: str) -> None:
    if failure:
        raise CheckpointError(failure)


def fail() -> None:
    raise RuntimeError("it refuses")


class Notes(list[str]):
    """What happened, in its order."""

    def change(self, name: str, **options: Any) -> Change:
        return Change(lambda: self.append(name), name, self.keeping(name), **options)

    def keeping(self, name: str) -> Callable[[], Callable[[], None]]:
        def keep() -> Callable[[], None]:
            self.append(f"keep {name}")
            return lambda: self.append(f"undo {name}")

        return keep


def test_changes_are_applied_in_the_order_of_stages_with_consensus() -> None:
    notes = Notes()
    weights = notes.change("weights", stage=Stage.LAST, first=(notes.change("extra"),))
    apply_all(
        [weights, notes.change("together", stage=Stage.TOGETHER), notes.change("alone"), nothing],
        notes.append,
    )
    assert notes == [
        *("keep extra", "extra", "keep alone", "alone", ""),
        *("keep together", "together", ""),
        *("keep weights", "weights", ""),
    ]


def test_changes_are_undone_in_reverse_order() -> None:
    notes = Notes()
    changes = [notes.change("a"), notes.change("b"), Change(fail, "c", notes.keeping("c")), notes.change("d")]
    with pytest.raises(CheckpointError, match="nothing was changed: RuntimeError: it refuses"):
        apply_all(changes, raise_failure)
    assert notes == ["keep a", "a", "keep b", "b", "keep c", "undo c", "undo b", "undo a"]


def test_a_failure_on_another_rank_undoes_the_changes_of_this_one() -> None:
    notes, said = Notes(), iter([None, CheckpointError("rank 1 refuses"), None])

    def raise_next(failure: str) -> None:
        if error := next(said):
            raise error

    changes = [
        notes.change("a"),
        notes.change("b", stage=Stage.TOGETHER),
        notes.change("c", stage=Stage.LAST),
    ]
    with pytest.raises(CheckpointError, match="nothing was changed: rank 1 refuses"):
        apply_all(changes, raise_next)
    assert notes == ["keep a", "a", "keep b", "b", "undo b", "undo a"]


def test_changes_that_cannot_be_undone_are_named() -> None:
    notes = Notes()
    changes = [
        Change(lambda: None, "engine", stage=Stage.LAST),
        notes.change("a"),
        Change(lambda: None, "large", lambda: fail),
        Change(fail, "weights", stage=Stage.LAST),
    ]
    with pytest.raises(CheckpointError) as caught:
        apply_all(changes, raise_failure)
    assert str(caught.value) == (
        "A checkpoint was not loaded: RuntimeError: it refuses. All is as it was before, but for large "
        "(RuntimeError: it refuses), engine (it has the loaded state, or a part of it), weights (it has the "
        "loaded state, or a part of it). Load another one, or start again."
    )
    assert notes[-1] == "undo a"


def test_a_lost_rank_undoes_the_changes_without_further_consensus() -> None:
    notes = Notes()

    def miss(failure: str) -> None:
        raise StateError("rank 1 did not come")

    with pytest.raises(StateError, match="did not come"):
        apply_all([notes.change("a")], miss)
    assert notes == ["keep a", "a", "undo a"]


def test_a_single_change_applies_its_first_changes() -> None:
    notes = Notes()
    notes.change("weights", first=(notes.change("extra"),))()
    assert notes == ["extra", "weights"]


def test_an_object_without_state_in_the_checkpoint_does_not_prevent_an_undo() -> None:
    notes = Notes()
    with pytest.raises(CheckpointError, match="nothing was changed: RuntimeError: it refuses$"):
        apply_all([notes.change("a"), nothing, Change(fail, "b", notes.keeping("b"))], raise_failure)
    assert notes == ["keep a", "a", "keep b", "undo b", "undo a"]
