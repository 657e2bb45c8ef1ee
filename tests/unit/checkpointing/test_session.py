"""What the saves and loads of one run share."""

from __future__ import annotations

import pytest

from accelerate import Accelerator
from accelerate.base import CheckpointError, environ
from accelerate.utils import ProjectConfiguration

pytestmark = pytest.mark.usefixtures("states")


@pytest.mark.parametrize(("value", "seconds"), [(None, 60.0), ("7", 7.0), ("0", 1800.0)])
def test_ranks_have_as_long_to_come_together_as_they_may_wait(value: str | None, seconds: float) -> None:
    with environ.patch_environment(**({} if value is None else {"accelerate_hang_timeout": value})):
        assert Accelerator(cpu=True)._runtime.checkpoints.patience == seconds


def test_numbers_that_are_taken_are_passed_over(tmp_path: object) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    assert accelerator.save_state().name == "checkpoint_0"
    project.iteration = 0
    assert accelerator.save_state().name == "checkpoint_1"
    assert accelerator.save_iteration == 2


def test_a_failure_in_the_background_surfaces_once(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.checkpointing import saving

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    project = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, async_save=True
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    monkeypatch.setattr(saving, "seal", full)
    folder = accelerator.save_state()
    with pytest.raises(CheckpointError, match="No space left"):
        accelerator.wait_for_checkpoint()
    accelerator.wait_for_checkpoint()
    assert not folder.exists()
    monkeypatch.undo()
    assert accelerator.save_state().parent.exists()
    accelerator.wait_for_checkpoint()
