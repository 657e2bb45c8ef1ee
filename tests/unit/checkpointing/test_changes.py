"""Files of a checkpoint are read, and changes are applied together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerate.base import CheckpointError, ConfigurationError, StateError
from accelerate.checkpointing import Change, CheckpointReader, Stage, apply_all, no_change


def test_only_files_of_the_checkpoint_are_read(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "own.bin")
    torch.save({"a": 2}, tmp_path / "foreign.bin")
    load = CheckpointReader(tmp_path, names={"own.bin", "gone.bin"})
    assert load.read("own.bin") == {"a": 1}
    assert not load.has("gone.bin")
    for name in ("foreign.bin", "gone.bin"):
        with pytest.raises(CheckpointError, match=rf"holds no {name}\. .*prepare the same ones"):
            load.read(name)
    assert CheckpointReader(tmp_path).read("foreign.bin") == {"a": 2}


def test_arguments_of_torch_load_are_passed_on(tmp_path: Path) -> None:
    torch.save({"a": tmp_path}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"pathlib\.\w+"):
        CheckpointReader(tmp_path).read("x.bin")
    assert CheckpointReader(tmp_path, load_kwargs={"weights_only": False}).read("x.bin") == {"a": tmp_path}


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("shapes"), AttributeError("no")])
def test_an_error_while_loading_names_the_file(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(CheckpointError, match=rf"x\.bin does not fit this Adam: {type(error).__name__}"),
        CheckpointReader(tmp_path).error_context("x.bin", "Adam"),
    ):
        raise error


def test_errors_of_this_package_are_not_replaced(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match="mine"),
        CheckpointReader(tmp_path).error_context("x.bin", "Adam"),
    ):
        raise ConfigurationError("mine")


def raise_failure(failure: str) -> None:
    if failure:
        raise CheckpointError(failure)


def fail() -> None:
    raise RuntimeError("it refuses")


class Log(list[str]):
    """Names of the applied changes, and the reported failures, in their order."""

    def change(self, name: str, stage: Stage = Stage.LOCAL) -> Change:
        return Change(lambda: self.append(name), name, stage)


def test_changes_are_applied_in_the_order_of_stages_with_consensus() -> None:
    log = Log()
    changes = [
        log.change("generators", Stage.GENERATORS),
        log.change("weights", Stage.COLLECTIVE),
        log.change("scheduler"),
        no_change,
    ]
    apply_all(changes, log.append)
    assert log == ["scheduler", "", "weights", "", "generators", ""]


def test_a_failed_change_names_the_objects_that_were_changed() -> None:
    log = Log()
    changes = [
        log.change("a"),
        no_change,
        Change(fail, "b"),
        log.change("c"),
        log.change("d", Stage.COLLECTIVE),
    ]
    with pytest.raises(CheckpointError) as caught:
        apply_all(changes, raise_failure)
    assert str(caught.value) == (
        "A checkpoint was not loaded: RuntimeError: it refuses. These objects have its state, or a part of "
        "it: a, b. The others are unchanged. Load another checkpoint, or start again."
    )
    assert log == ["a"]


def test_a_failure_on_another_rank_stops_this_one_before_the_next_stage() -> None:
    log, answers = Log(), iter([None, CheckpointError("rank 1 refuses")])

    def raise_next(failure: str) -> None:
        if error := next(answers):
            raise error

    changes = [log.change(stage.name, stage) for stage in Stage]
    with pytest.raises(CheckpointError, match=r"rank 1 refuses\. These objects .*: LOCAL, COLLECTIVE\."):
        apply_all(changes, raise_next)
    assert log == ["LOCAL", "COLLECTIVE"]


def test_a_failure_before_any_change_of_this_rank_changes_nothing() -> None:
    with pytest.raises(CheckpointError, match="nothing was changed: rank 1 refuses"):
        apply_all([no_change], lambda _: raise_failure("rank 1 refuses"))


def test_an_absent_rank_ends_the_load() -> None:
    log = Log()

    def miss(failure: str) -> None:
        raise StateError("rank 1 did not arrive")

    with pytest.raises(StateError, match="did not arrive"):
        apply_all([log.change("a"), log.change("b", Stage.COLLECTIVE)], miss)
    assert log == ["a"]
