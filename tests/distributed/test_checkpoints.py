"""Checkpoints of several processes: complete or absent, and refused on all ranks in the same way."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.base import CheckpointError, StateError
from accelerate.checkpointing import manifest, parts
from accelerate.utils import ProjectConfiguration, set_seed

Run = Callable[..., list[Any]]


def prepared(**choices: Any) -> tuple[Accelerator, nn.Module, Any]:
    """A tiny run whose optimizer has a state."""
    project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True, **choices)
    accelerator = Accelerator(project_config=project)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(3, 4) * (accelerator.process_index + 1)).sum())
    optimizer.step()
    optimizer.zero_grad()


def weight(model: nn.Module) -> list[float]:
    return next(model.parameters()).flatten().tolist()


def save_and_load() -> Any:
    accelerator, model, optimizer = prepared()
    torch.manual_seed(accelerator.process_index)
    found = []
    for blocking in (True, False):
        accelerator.step = 5
        folder = accelerator.save_state(blocking=blocking)
        before, drawn = weight(model), torch.rand(2).tolist()
        step(accelerator, model, optimizer)
        accelerator.wait_for_checkpoint()
        names = sorted(path.name for path in folder.iterdir())
        accelerator.step = 0
        accelerator.load_state()
        same = (weight(model), torch.rand(2).tolist(), accelerator.step) == (before, drawn, 5)
        found.append((folder.name, same, names))
    accelerator.end_training()
    return found, sorted(path.name for path in folder.parent.iterdir())


def test_all_ranks_restore_their_state(run: Run) -> None:
    files = ["manifest.json", "model.safetensors", "optimizer.bin"]
    files += ["random_states_0.pkl", "random_states_1.pkl"]
    for found, numbered in run(save_and_load):
        assert found == [(f"checkpoint_{number}", True, files) for number in (0, 1)]
        assert numbered == ["checkpoint_0", "checkpoint_1"]


def save_on_one_rank() -> str:
    accelerator, _, _ = prepared()
    accelerator._runtime.checkpoints.timeout = 0.5
    if accelerator.is_main_process:
        from accelerate.state import agreement

        agreement.DECISION_TIMEOUT = 0.2
        with pytest.raises(StateError) as error:
            accelerator.save_state()
        return str(error.value)
    return ""


def test_a_save_on_one_rank_names_the_others(run: Run) -> None:
    message, _, _ = run(save_on_one_rank, processes=3)
    assert "processes 1, 2 did not arrive within 0.5 s" in message
    assert "is_main_process" in message


def save_on_the_other_rank() -> str:
    accelerator, _, _ = prepared()
    accelerator._runtime.checkpoints.timeout = 0.1
    message = ""
    if not accelerator.is_main_process:
        from accelerate.state import agreement

        agreement.DECISION_TIMEOUT = 0.2
        with pytest.raises(StateError) as error:
            accelerator.save_state()
        message = str(error.value)
    accelerator.wait_for_everyone()
    return message


def test_a_save_without_rank_0_is_no_hang(run: Run) -> None:
    assert "process 0 did not arrive" in run(save_on_the_other_rank)[1]


def save_while_the_other_loads() -> str:
    accelerator, _, _ = prepared()
    folder = accelerator.save_state()
    with pytest.raises(StateError) as error:
        if accelerator.is_main_process:
            accelerator.save_state()
        else:
            accelerator.load_state(folder)
    return str(error.value)


def test_different_calls_name_each_other(run: Run) -> None:
    for message in run(save_while_the_other_loads):
        assert "Process 0: accelerator.save_state" in message
        assert "Process 1: accelerator.load_state" in message


def fail_to_write() -> Any:
    accelerator, model, optimizer = prepared(total_limit=1)
    first = accelerator.save_state()
    before, found = weight(model), []
    seal = manifest.seal

    def full(folder: Path, name: str, rank: int = 0) -> manifest.FileRecord:
        if rank == 1:
            raise OSError(28, "No space left on device", name)
        return seal(folder, name, rank)

    from accelerate.checkpointing import saving

    for blocking in (True, False):
        step(accelerator, model, optimizer)
        saving.seal = full
        with pytest.raises(CheckpointError, match=r"process 1: .*No space left") as error:
            accelerator.save_state(blocking=blocking)
            accelerator.wait_for_checkpoint()
        saving.seal = seal
        accelerator.wait_for_everyone()  # rank 0 clears up
        left = sorted(os.listdir(first.parent))
        accelerator.load_state()
        accelerator.wait_for_everyone()
        found.append((str(error.value), left, weight(model) == before))
    return found


def test_a_full_disk_of_one_rank_leaves_the_old_checkpoint(run: Run) -> None:
    for found in run(fail_to_write):
        for message, left, same in found:
            assert "the ones before it are unchanged" in message
            assert left == ["checkpoint_0"]
            assert same


def load_damaged() -> Any:
    accelerator, model, optimizer = prepared()
    accelerator.save_state()
    before = weight(model)
    step(accelerator, model, optimizer)
    newest = accelerator.save_state()
    if accelerator.is_main_process:
        with (newest / "random_states_1.pkl").open("r+b") as file:
            file.write(b"?")
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match=r"random_states_1\.pkl does not fit its checksum"):
        accelerator.load_state(newest)
    accelerator.load_state()
    return weight(model) == before


def test_a_damaged_file_of_any_rank_is_refused_on_all(run: Run) -> None:
    assert run(load_damaged) == [True, True]


def save_for_others(folder: str) -> None:
    accelerator, _, _ = prepared()
    accelerator.save_state()
    if accelerator.is_main_process:
        Path(folder).parent.mkdir(exist_ok=True)
        (Path("project/checkpoints") / "checkpoint_0").rename(folder)
    accelerator.end_training()


def load_from_others(folder: str, policies: list[str]) -> list[Any]:
    accelerator, _, _ = prepared()
    found: list[Any] = []
    for policy in policies:
        torch.manual_seed(1234 + accelerator.process_index)
        kept = torch.get_rng_state()
        try:
            accelerator.load_state(folder, world_size_policy=policy)
            found.append((torch.equal(kept, torch.get_rng_state()), torch.rand(1).item()))
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_another_number_of_processes(run: Run, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved by two")
    run(save_for_others, folder)
    ranks = run(load_from_others, folder, ["strict", "reseed", "reseed", "ignore"], processes=3)
    strict, reseeded, again, ignored = zip(*ranks, strict=True)
    assert all("saved by 2 processes, and this run has 3" in message for message in strict)
    assert len({drawn for _, drawn in reseeded}) == 3
    assert reseeded == again
    assert [kept for kept, _ in ignored] == [False, False, True]


def save_to_machines_of_their_own() -> Any:
    """Two processes on two machines that share no disk: each sees a folder of its own under one name."""
    rank = int(os.environ["RANK"])
    own = Path(f"machine{rank}").absolute()
    own.mkdir()
    os.chdir(own)
    os.environ["LOCAL_RANK"] = "0"
    accelerator, model, _ = prepared()
    from accelerate.checkpointing import saving

    saving.socket.gethostname = lambda: f"machine{rank}"
    folder = accelerator.save_state(Path("here"))
    before = weight(model)
    accelerator.load_state()
    accelerator.wait_for_everyone()
    held = manifest.read(folder)
    return weight(model) == before, sorted(held.files), held.world_size


def test_machines_without_a_common_disk_keep_a_folder_each(run: Run) -> None:
    first, second = run(save_to_machines_of_their_own)
    assert first == (True, ["model.safetensors", "optimizer.bin", "random_states_0.pkl"], 2)
    assert second == (True, ["model.safetensors", "optimizer.bin", "random_states_1.pkl"], 2)


def save_to_folders_of_their_own() -> Any:
    """Each process saves to a folder of its own; the folders are then copied into one, which all load."""
    accelerator, model, optimizer = prepared()
    accelerator.project_configuration.automatic_checkpoint_naming = False
    set_seed(1, device_specific=True)
    batches = iter(accelerator.prepare(DataLoader(range(8), shuffle=True)))
    next(batches)  # the state of the loader holds the generators of this rank
    own = accelerator.save_state(Path(f"rank{accelerator.process_index}").absolute())
    before, drawn = weight(model), torch.rand(1).item()
    accelerator.wait_for_everyone()
    copied = Path("copied").absolute()
    if accelerator.is_main_process:
        assert Path("rank0/sampler.bin").read_bytes() != Path("rank1/sampler.bin").read_bytes()
        shutil.copytree("rank0", copied)
        shutil.copytree("rank1", copied, dirs_exist_ok=True)
    accelerator.wait_for_everyone()
    step(accelerator, model, optimizer)
    accelerator.load_state(copied)
    is_same = (weight(model), torch.rand(1).item()) == (before, drawn)
    files = sorted(manifest.read(copied).files)
    accelerator.wait_for_everyone()
    (copied / "random_states_1.pkl").unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError) as loading:
        accelerator.load_state(copied)
    texts = (own / manifest.NAME).read_text(), (copied / manifest.NAME).read_text()
    return is_same, files, str(loading.value), texts


def test_folders_of_one_save_that_are_copied_into_one_are_a_checkpoint(run: Run) -> None:
    """As Ray copies those of several machines; whichever manifest it copies last."""
    first, second = run(save_to_folders_of_their_own)
    files = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"]
    files.append("sampler.bin")
    for is_same, held, error, texts in (first, second):
        assert is_same
        assert held == files
        assert "random_states_1.pkl" in error
        assert set(texts) == {*first[3]}
    assert len({*first[3]}) == 1


def train_while_saving() -> Any:
    accelerator, model, optimizer = prepared()
    wrote = threading.Event()
    write = parts.write_whole_tensors

    def slow(*args: Any) -> None:
        assert wrote.wait(20)
        write(*args)

    parts.write_whole_tensors = slow
    before = weight(model)
    folder = accelerator.save_state(blocking=False)
    for _ in range(3):
        step(accelerator, model, optimizer)
    unfinished = not folder.exists()
    wrote.set()
    accelerator.end_training()
    return unfinished, before, folder.exists() and weight_in(folder)


def weight_in(folder: Path) -> list[float]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")["weight"].flatten().tolist()


def test_training_continues_while_a_checkpoint_is_written(run: Run) -> None:
    for unfinished, before, written in run(train_while_saving):
        assert unfinished
        assert written == before


def fail_in_a_hook_of_one_rank() -> Any:
    accelerator, model, _ = prepared()
    first = accelerator.save_state()
    before = weight(model)

    def fail(*args: Any) -> None:
        if not accelerator.is_main_process:
            raise KeyError("mine")

    handle = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises((KeyError, CheckpointError)) as saving:
        accelerator.save_state()
    handle.remove()
    accelerator.register_load_state_pre_hook(fail)
    with pytest.raises(CheckpointError) as loading:
        accelerator.load_state(first)
    accelerator.wait_for_everyone()
    return str(saving.value), str(loading.value), weight(model) == before, os.listdir(first.parent)


def test_the_error_of_a_hook_of_one_rank_is_one_on_all(run: Run) -> None:
    first, second = run(fail_in_a_hook_of_one_rank)
    assert "process 1: KeyError: 'mine'" in first[0]
    assert second[0] == "'mine'"
    for _, loading, same, left in (first, second):
        assert "KeyError: 'mine'" in loading
        assert same
        assert left == ["checkpoint_0"]
