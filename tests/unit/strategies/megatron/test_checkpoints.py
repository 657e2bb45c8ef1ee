"""What Megatron-LM writes is committed, sealed and read like the rest of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accelerate.base import CheckpointError

from .conftest import Fake, Start


@pytest.fixture
def writing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake write files, and record their paths."""
    save, load = fake.save_checkpoint, fake.load_checkpoint

    def save_checkpoint(*args: object, **further: object) -> None:
        save(*args, **further)  # type: ignore[arg-type]
        folder = Path(fake.get_args().save) / "iter_0000004"
        folder.mkdir(parents=True)
        torch.save(fake.parts[0].state_dict(), folder / "weights.pt")

    def load_checkpoint(*args: object) -> tuple[int, int]:
        folder = Path(fake.get_args().load) / "iter_0000004"
        fake.parts[0].load_state_dict(torch.load(folder / "weights.pt"))
        fake.checkpoints[fake.get_args().load] = 4
        return load(*args)  # type: ignore[arg-type]

    import sys

    module = sys.modules["megatron.training.checkpointing"]
    monkeypatch.setattr(module, "save_checkpoint", save_checkpoint)
    monkeypatch.setattr(module, "load_checkpoint", load_checkpoint)
    monkeypatch.setattr(module, "checkpoint_exists", lambda folder: Path(folder, "iter_0000004").is_dir())


@pytest.mark.usefixtures("writing")
def test_a_run_is_saved_and_resumed(start: Start, fake: Fake, tmp_path: Path) -> None:
    accelerator, model, optimizer, *_, loader = start()
    model.train()
    for batch in loader:
        model(**batch)
        optimizer.step()
    accelerator.save_state(tmp_path / "state")
    saved = fake.parts[0].table.weight.detach().clone()
    sealed = json.loads(next((tmp_path / "state").glob("*.json")).read_text())
    assert "megatron/iter_0000004/weights.pt" in json.dumps(sealed)
    assert not list((tmp_path / "state").glob("optimizer*"))
    for batch in loader:
        model(**batch)
        optimizer.step()
    assert not saved.equal(fake.parts[0].table.weight)
    accelerator.load_state(tmp_path / "state")
    assert saved.equal(fake.parts[0].table.weight)
    assert model.iteration == 4
    assert optimizer.num_updates == 4


@pytest.mark.usefixtures("writing")
def test_damage_is_found_before_anything_is_changed(start: Start, fake: Fake, tmp_path: Path) -> None:
    accelerator, *_ = start()
    accelerator.save_state(tmp_path / "state")
    (tmp_path / "state" / "megatron" / "iter_0000004" / "weights.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"weights\.pt"):
        accelerator.load_state(tmp_path / "state")
    assert fake.called("load_checkpoint") == []


@pytest.mark.usefixtures("writing")
def test_a_checkpoint_replaced_while_it_is_read_is_an_error(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accelerator, *_ = start()
    accelerator.save_state(tmp_path / "state")
    accelerator.save_state(tmp_path / "other")
    engine = type(accelerator._models[0])
    read = engine.load_checkpoint

    def replace(*args: object) -> None:
        read(*args)  # type: ignore[arg-type]
        (tmp_path / "state").rename(tmp_path / "old")
        (tmp_path / "other").rename(tmp_path / "state")

    monkeypatch.setattr(engine, "load_checkpoint", replace)
    with pytest.raises(
        CheckpointError, match="another save replaced it while it was read.*These objects have its state"
    ):
        accelerator.load_state(tmp_path / "state")


def test_checkpoints_of_other_runs_are_refused(start: Start, tmp_path: Path) -> None:
    accelerator, *_ = start()
    part = accelerator._runtime.strategy.state.engine_part(0, accelerator._models[0])
    from accelerate.checkpointing import CheckpointReader

    with pytest.raises(CheckpointError, match="holds no megatron"):
        part.read(CheckpointReader(tmp_path))
