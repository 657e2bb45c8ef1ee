"""Recent checkpoints of a single process: when they are saved, which one is loaded, and what is refused."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.accelerator.fast_saves import _state_bytes
from accelerate.base import CheckpointError, ConfigurationError
from accelerate.checkpointing import fast_tier, manifest, saving
from accelerate.checkpointing.exchange import Transfer
from accelerate.checkpointing.fast_tier import plan_copies
from accelerate.checkpointing.nodes import Nodes
from accelerate.nested import iterate_tensors
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed


@pytest.fixture
def begin(states: None, tmp_path: Path) -> Callable[..., Any]:
    """Begins a run as a new process would, and returns its accelerator, model, optimizer and loader."""

    def begin(numbered: bool = True, every: int = 3, num_steps: int = 1, **options: Any) -> Any:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        project = {"project_dir": str(tmp_path / "project"), "automatic_checkpoint_naming": numbered}
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=num_steps,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
            project_config=ProjectConfiguration(
                **{**project, "fast_dir": str(tmp_path / "fast"), "fast_every": every, **options}
            ),
        )
        set_seed(1)
        data: Any = torch.randn(40, 4)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        return accelerator, *accelerator.prepare(model, optimizer, loader)

    return begin


def train(run: Any, until: int) -> None:
    """Trains up to a number of steps, and reads the next batch, as a loop does before it ends."""
    accelerator, model, optimizer, loader = run
    while optimizer.num_updates < until:
        for batch in loader:
            if optimizer.num_updates == until:
                break
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_checkpoint()


def steps_of(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder."""
    return sorted(
        manifest.read(path.parent).num_updates for path in folder.glob("checkpoint_*/manifest.json")
    )


def test_the_newest_generation_is_kept_and_every_nth_one_is_durable(
    begin: Callable[..., Any], tmp_path: Path
) -> None:
    train(begin(durable_every=2), 16)
    assert steps_of(tmp_path / "fast") == [15]
    assert steps_of(tmp_path / "project" / "checkpoints") == [6, 12]


def test_a_run_that_fails_often_is_durable_after_as_many_steps(
    begin: Callable[..., Any], tmp_path: Path
) -> None:
    for until in (4, 7, 10, 13, 16, 19):
        run = begin(durable_every=2)
        if until > 4:
            run[0].load_state()
        train(run, until)
    assert steps_of(tmp_path / "project" / "checkpoints") == [6, 12, 18]


def test_a_full_fast_folder_is_named_and_the_project_has_the_run(
    begin: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    run = begin(durable_every=10)
    write = saving.Saver._write

    def write_unless_fast(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.staging.request.is_generation:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, *args, **kwargs)

    train(run, 4)
    monkeypatch.setattr(saving.Saver, "_write", write_unless_fast)
    train(run, 8)
    assert str(tmp_path / "fast") in caplog.text
    assert "No space left on device" in caplog.text
    assert f"so the run is saved to {tmp_path / 'project' / 'checkpoints'} now" in caplog.text
    monkeypatch.setattr(saving.Saver, "_write", write)
    train(run, 12)
    assert steps_of(tmp_path / "project" / "checkpoints") == [8]
    assert steps_of(tmp_path / "fast") == [12]
    resumed = begin()
    resumed[0].load_state()
    assert resumed[2].num_updates == 12


def test_without_a_project_a_full_fast_folder_is_an_error(
    begin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = begin(numbered=False)
    monkeypatch.setattr(saving.Saver, "_write", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(run, 4)


def test_a_process_leaves_no_temporary_folder(tmp_path: Path) -> None:
    program = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
project = ProjectConfiguration(sys.argv[1] + "/project", fast_dir=sys.argv[1] + "/fast", fast_every=1)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(4, 1))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
accelerator.end_training()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert [path.name for path in (tmp_path / "fast").iterdir()] == ["checkpoint_3"]


@pytest.mark.parametrize("until", [7, 11, 20])
def test_a_resumed_run_ends_with_the_weights_of_one_run(
    begin: Callable[..., Any], tmp_path: Path, until: int
) -> None:
    whole = begin(fast_dir=None)
    train(whole, 24)
    expected = [parameter.clone() for parameter in whole[1].parameters()]
    train(begin(), until)
    resumed = begin()
    resumed[0].load_state()
    assert resumed[2].num_updates == until - until % 3
    train(resumed, 24)
    assert all(map(torch.equal, expected, resumed[1].parameters()))


def train_in_windows(run: Any, until: int) -> None:
    """Trains in windows of two batches, which read their loader ahead of the loop."""
    accelerator, model, optimizer, loader = run
    while optimizer.num_updates < until:
        for window in accelerator.windows(loader):
            if optimizer.num_updates == until:
                break
            for batch in window:
                accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_checkpoint()


def test_a_run_in_windows_resumes_with_the_weights_of_one_run(begin: Callable[..., Any]) -> None:
    whole = begin(fast_dir=None, num_steps=2)
    train_in_windows(whole, 14)
    expected = [parameter.clone() for parameter in whole[1].parameters()]
    train_in_windows(begin(num_steps=2), 8)
    resumed = begin(num_steps=2)
    resumed[0].load_state()
    assert resumed[2].num_updates == 6
    train_in_windows(resumed, 14)
    assert all(map(torch.equal, expected, resumed[1].parameters()))


def test_a_generation_without_a_project_is_loaded(begin: Callable[..., Any]) -> None:
    train(begin(project_dir=None, numbered=False), 4)
    resumed = begin(project_dir=None, numbered=False)
    resumed[0].load_state()
    assert resumed[2].num_updates == 3


def test_a_saved_state_is_durable_and_a_generation(begin: Callable[..., Any], tmp_path: Path) -> None:
    run = begin()
    train(run, 4)
    run[0].save_state()
    assert steps_of(tmp_path / "project" / "checkpoints") == [4]
    resumed = begin()
    shutil.rmtree(tmp_path / "project" / "checkpoints")
    resumed[0].load_state()
    assert resumed[2].num_updates == 4


def test_the_number_of_the_next_durable_checkpoint_is_loaded(begin: Callable[..., Any]) -> None:
    run = begin()
    run[0].save_state()
    train(run, 4)
    resumed = begin()
    resumed[0].load_state()
    assert Path(resumed[0].save_state()).name == "checkpoint_1"


def test_a_newer_durable_checkpoint_is_loaded_first(begin: Callable[..., Any]) -> None:
    train(begin(), 4)
    later = begin(fast_dir=None)
    train(later, 8)
    later[0].save_state()
    resumed = begin()
    resumed[0].load_state()
    assert resumed[2].num_updates == 8


def test_damaged_generations_are_named_and_the_durable_checkpoint_is_loaded(
    begin: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(begin(durable_every=1), 4)
    train(begin(durable_every=None), 4)
    (path,) = (tmp_path / "fast").glob("checkpoint_*/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(content)
    resumed = begin()
    resumed[0].load_state()
    assert resumed[2].num_updates == 3
    assert "model.safetensors does not fit its checksum" in caplog.text
    assert "no remaining node stores model.safetensors" in caplog.text


def test_an_interrupted_save_leaves_nothing_and_the_generation_before(
    begin: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin()
    train(run, 4)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("accelerate.checkpointing.saving.seal", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(run, 7)
    assert steps_of(tmp_path / "fast") == [3]
    assert not list((tmp_path / "fast").glob(".*/checkpoint_*/*"))


def test_files_of_hooks_are_in_the_generation(begin: Callable[..., Any], tmp_path: Path) -> None:
    run = begin()
    seen: list[str] = []

    def save(models: Any, weights: Any, folder: str) -> None:
        (Path(folder) / "more").mkdir()
        (Path(folder) / "more" / "notes.json").write_text(json.dumps(run[2].num_updates))

    run[0].register_save_state_pre_hook(save)
    train(run, 4)
    resumed = begin()
    resumed[0].register_load_state_pre_hook(
        lambda models, folder: seen.append((Path(folder) / "more" / "notes.json").read_text())
    )
    resumed[0].load_state()
    assert seen == ["3"]


def test_evaluation_saves_nothing(begin: Callable[..., Any], tmp_path: Path) -> None:
    run = begin()
    train(run, 4)
    before = list((tmp_path / "fast").glob("checkpoint_*"))
    for _ in run[3]:
        pass
    run[0].wait_for_checkpoint()
    assert list((tmp_path / "fast").glob("checkpoint_*")) == before


@pytest.mark.parametrize("is_kept", [False, True], ids=["pass", "iterator"])
def test_an_evaluation_in_the_body_of_the_loop_saves_nothing(
    begin: Callable[..., Any], tmp_path: Path, is_kept: bool
) -> None:
    accelerator, model, optimizer, loader = begin()
    data: Any = torch.randn(40, 4)
    evaluation = accelerator.prepare(DataLoader(data, batch_size=2))
    batches = iter(evaluation)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with torch.set_grad_enabled(not is_kept):
            if is_kept:
                next(batches)
            else:
                list(evaluation)
        accelerator.wait_for_checkpoint()
        last = (optimizer.num_updates - 1) // 3 * 3  # saved before this batch
        assert steps_of(tmp_path / "fast") == ([last] if last else [])


def test_a_loader_that_another_thread_reads_saves_nothing_and_warns(
    begin: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = begin()
    batches = iter(run[3])

    with ThreadPoolExecutor(1) as reader:
        for _ in range(8):
            batch = reader.submit(next, batches).result()
            run[0].backward(run[1](batch).square().mean())
            run[2].step()
            run[2].zero_grad()
    assert not list((tmp_path / "fast").glob("checkpoint_*"))
    assert caplog.text.count("No recent checkpoints are saved") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fast_every": 0}, "fast_every"),
        ({"fast_every": 1.5}, "fast_every=1.5: it is not a whole number"),
        ({"copies": True}, "copies=True: it is not a whole number"),
        ({"fast_dir": ""}, "fast_dir='': it is empty"),
        ({"fast_dir": 5}, "fast_dir=5: it is not a path"),
        ({"copies": -1}, "copies"),
        ({"copies": 1, "fast_dir": None}, "copies=1: there is no fast tier. Set fast_dir"),
        ({"durable_every": 2, "automatic_checkpoint_naming": False}, "durable checkpoints have no names"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ProjectConfiguration(**{"project_dir": "p", "fast_dir": "f", **options})


def test_more_copies_than_other_nodes_are_refused(begin: Callable[..., Any]) -> None:
    with pytest.raises(
        ConfigurationError, match="copies=1: the run has 1 node, and a copy is on another node"
    ):
        begin(copies=1)


@pytest.mark.parametrize("is_link", [False, True])
def test_the_folder_of_durable_checkpoints_is_refused(
    begin: Callable[..., Any], tmp_path: Path, is_link: bool
) -> None:
    (tmp_path / "project" / "checkpoints").mkdir(parents=True)
    folder = tmp_path / "project" / "checkpoints"
    if is_link:
        folder = tmp_path / "link"
        folder.symlink_to(tmp_path / "project" / "checkpoints")
    with pytest.raises(ConfigurationError, match="it is the folder of durable checkpoints"):
        begin(fast_dir=folder)


def test_a_folder_with_durable_checkpoints_is_refused(begin: Callable[..., Any], tmp_path: Path) -> None:
    accelerator, *_ = begin(numbered=False)
    saved = accelerator.save_state(tmp_path / "mine" / "checkpoint_5")
    with pytest.raises(CheckpointError, match="checkpoint_5 in it is a durable checkpoint"):
        begin(numbered=False, fast_dir=tmp_path / "mine")
    assert Path(saved, "manifest.json").is_file()


def test_a_network_disk_is_refused(
    begin: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = namedtuple("disk", "mountpoint fstype")
    monkeypatch.setattr(
        psutil, "disk_partitions", lambda all: [disk("/", "ext4"), disk(str(tmp_path), "nfs4")]
    )
    with pytest.raises(ConfigurationError, match=r"fast_dir='.*fast': it is on a network disk \(nfs4\)"):
        begin()


def test_a_folder_that_cannot_be_written_is_refused(begin: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "fast").write_text("a file")
    with pytest.raises(ConfigurationError, match="fast_dir=.* cannot be written: .* File exists"):
        begin()


def test_a_small_disk_is_refused_before_the_first_step(
    begin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_tier, "free_bytes", lambda folder: 1000)
    with pytest.raises(
        ConfigurationError, match="2 recent checkpoints take 1.18 KB on .*, and 1000 bytes are free"
    ):
        begin()


def test_the_space_of_averages_is_checked(begin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_tier, "free_bytes", lambda folder: 1300)
    accelerator, model, _, _ = begin()
    with pytest.raises(ConfigurationError, match="2 recent checkpoints take 1.56 KB"):
        accelerator.average(model)


def test_generations_of_another_project_are_kept_and_refused(
    begin: Callable[..., Any], tmp_path: Path
) -> None:
    train(begin(), 4)
    with pytest.raises(
        CheckpointError, match="contains a checkpoint of the project .*project'.*Choose another folder"
    ):
        begin(project_dir=str(tmp_path / "other"))
    assert steps_of(tmp_path / "fast") == [3]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters),
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True, fused=True),
        lambda parameters: torch.optim.SGD(parameters),
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        lambda parameters: torch.optim.Adafactor(parameters),
    ],
)
def test_the_bytes_of_the_states_of_optimizers_are_known_before_the_first_step(make: Any) -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20))
    model[0].bias.requires_grad_(False)
    optimizer = make(model.parameters())
    before = _state_bytes(optimizer, False)
    assert not optimizer.state
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    assert before == sum(tensor.nbytes for tensor in iterate_tensors(dict(optimizer.state)))


def test_copies_go_to_the_next_nodes_that_lack_a_file() -> None:
    nodes = Nodes(Path(), 0, [[0, 1], [2], [3, 4]], ["a", "b", "c"], [""] * 3)
    names = [["weights", "r0"], ["r1"], ["weights", "r2"], ["weights", "r3"], ["r4"]]
    summaries = [{"records": [{"name": name, "size": 1} for name in own]} for own in names]
    assert plan_copies(nodes, 1, summaries) == [
        Transfer("r0", 1, 0, 2),
        Transfer("r1", 1, 1, 2),
        Transfer("r2", 1, 2, 3),
        Transfer("r3", 1, 3, 0),
        Transfer("r4", 1, 4, 1),
    ]
    assert len(plan_copies(nodes, 2, summaries)) == 10
