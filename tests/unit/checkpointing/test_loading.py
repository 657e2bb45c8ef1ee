"""Choosing a checkpoint: what is compared, what is skipped, and what is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.base import CheckpointError, ConfigurationError
from accelerate.checkpointing import (
    CheckpointReader,
    CheckpointSource,
    FileRecord,
    Manifest,
    RunProgress,
    divide_files,
    loading,
    manifest,
    nothing_to_load,
    plan_staging_folder,
    read_progress,
    remove,
    retention,
    seal,
)
from accelerate.checkpointing.folder import name_of
from accelerate.state import Consensus, Topology

ALONE = Topology()


def make(folder: Path, world_size: int = 1, **names: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in names.items():
        (folder / name).write_text(text)
    Manifest({name: seal(folder, name) for name in names}, world_size).write(folder)
    return folder


def agree(source: CheckpointSource, failure: str = "") -> str:
    try:
        source.agree(failure)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_complete_checkpoint_is_readable_and_has_no_faults(tmp_path: Path) -> None:
    source = CheckpointSource(make(tmp_path / "one", a="1", b="2"), Consensus(), ALONE)
    assert source.is_readable
    assert agree(source) == ""
    assert not source.resized
    assert CheckpointSource(make(tmp_path / "two", 3), Consensus(), ALONE).resized


def test_all_faults_are_reported_once(tmp_path: Path) -> None:
    folder = make(tmp_path / "one", a="1", b="2", c="3")
    (folder / "a").unlink()
    (folder / "b").write_text("x")
    said = agree(CheckpointSource(folder, Consensus(), ALONE), "mine")
    assert said.count("a is missing") == 1
    assert "b does not fit its checksum" in said
    assert said.endswith("mine")


def test_a_file_that_cannot_be_read_is_a_fault_and_no_crash(tmp_path: Path) -> None:
    folder = make(tmp_path / "one", a="1")
    (folder / "a").unlink()
    (folder / "a").symlink_to("a")
    assert "a " in agree(CheckpointSource(folder, Consensus(), ALONE))


@pytest.mark.parametrize("damage", ["", "[" * 5000, "[1]", '{"seal": 1}', "{}", "\xff"])
def test_a_damaged_manifest_is_a_fault(tmp_path: Path, damage: str) -> None:
    folder = make(tmp_path / "one", a="1")
    (folder / manifest.NAME).write_bytes(damage.encode("latin-1"))
    source = CheckpointSource(folder, Consensus(), ALONE)
    assert not source.is_readable
    assert "manifest.json" in agree(source)


def test_a_manifest_with_unknown_fields_is_a_fault(tmp_path: Path) -> None:
    folder = make(tmp_path / "one", a="1")
    content = json.loads((folder / manifest.NAME).read_text())
    del content["seal"]
    content["surprise"] = 1
    (folder / manifest.NAME).write_text(json.dumps({**content, "seal": manifest._seal_of(content)}))
    assert "'surprise'" in agree(CheckpointSource(folder, Consensus(), ALONE))


def test_a_folder_of_checkpoints_is_refused_as_a_checkpoint(tmp_path: Path) -> None:
    make(tmp_path / "checkpoint_4")
    assert "pass" in agree(CheckpointSource(tmp_path, Consensus(), ALONE))
    assert "checkpoint_4" in agree(CheckpointSource(tmp_path, Consensus(), ALONE))
    assert agree(CheckpointSource(tmp_path / "nothing", Consensus(), ALONE)) == loading.NO_FOLDER


def test_candidates_are_ordered_from_the_newest_and_incomplete_ones_are_not_readable(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        make(tmp_path / name_of(number), a="1")
    (tmp_path / "checkpoint_10" / "a").unlink()
    found = list(loading.open_newest(tmp_path, Consensus(), ALONE, 1.0))
    assert [source.folder.name for source in found] == ["checkpoint_10", "checkpoint_2", "checkpoint_1"]
    assert [source.is_readable for source in found] == [False, True, True]


@pytest.mark.usefixtures("states")
def test_a_rank_that_cannot_list_the_folder_has_no_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(parent: Path) -> list[Any]:
        raise PermissionError(13, "Permission denied", str(parent))

    Accelerator(cpu=True)
    monkeypatch.setattr(retention, "survey", fail)
    assert list(loading.open_newest(tmp_path, Consensus(), ALONE, 1.0)) == []
    assert "cannot be listed: [Errno 13] Permission denied" in caplog.text


def test_a_replacement_that_was_interrupted_is_undone_before(tmp_path: Path) -> None:
    make(tmp_path / "one").rename(tmp_path / ".one.old-otherhost-1-0x0")
    assert agree(next(loading.open_checkpoint(tmp_path / "one", Consensus(), ALONE, 1.0))) == ""


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_each_file_is_assigned_to_one_rank_by_size(processes: int) -> None:
    sizes = {"a": 100, "b": 60, "c": 50, "d": 10, "e": 0}
    shares = divide_files(
        Manifest({name: FileRecord(name, size, "") for name, size in sizes.items()}, 1), processes
    )
    assert len(shares) == processes
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    if processes == 2:
        assert sorted(sum(sizes[name] for name in share) for share in shares) == [110, 110]


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize(
    ("policy", "text"), [("reseed", "derives new states"), ("ignore", "the others keep theirs")]
)
def test_another_number_of_processes_is_announced(
    tmp_path: Path, policy: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    Accelerator(cpu=True)
    source = CheckpointSource(make(tmp_path / "one", 3), Consensus(), ALONE)
    loading.check_source(source, 1, policy)
    assert "was saved by 3 processes, and this run has 1" in caplog.text
    assert text in caplog.text
    with pytest.raises(CheckpointError, match=r'Start 3 processes, or pass world_size_policy="reseed"'):
        loading.check_source(source, 1, "strict")
    with pytest.raises(ConfigurationError, match="Choose one of strict, reseed, ignore"):
        loading.check_policy("maybe")


@pytest.mark.usefixtures("states")
def test_a_folder_without_a_manifest_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Accelerator(cpu=True)
    loading.check_source(CheckpointSource(tmp_path, Consensus(), ALONE), 1, "strict")
    assert "without being verified" in caplog.text


@pytest.mark.usefixtures("states")
def test_saved_states_without_an_object_give_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Accelerator(cpu=True)
    names = ("model.safetensors", "scheduler_1.bin", "random_states_4.pkl", "mine.bin")
    load = CheckpointReader(tmp_path, names=names)
    load.has("model.safetensors")
    loading.announce_surplus(load)
    assert "holds scheduler_1.bin, and this run" in caplog.text
    caplog.clear()
    loading.announce_surplus(CheckpointReader(tmp_path))
    assert caplog.text == ""


@pytest.mark.usefixtures("states")
def test_a_new_loader_for_each_evaluation_gives_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    loaders = [accelerator.prepare(DataLoader([1, 2, 3])) for _ in range(2)]  # type: ignore[arg-type]
    for loader in loaders:
        list(loader)
    accelerator.save_state(tmp_path / "between")
    for _ in loaders[1]:
        accelerator.save_state(tmp_path / "within")
        break
    accelerator.free_memory()
    accelerator.prepare(DataLoader([1, 2, 3]))  # type: ignore[arg-type]
    accelerator.load_state(tmp_path / "between")
    assert "sampler_1.bin" not in caplog.text
    accelerator.load_state(tmp_path / "within")
    assert "sampler_1.bin" in caplog.text


def test_a_checkpoint_with_more_registered_objects_is_refused(tmp_path: Path) -> None:
    saved = CheckpointReader(tmp_path, names=("custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"))
    loading.check_registered(saved, ["Counter", "Counter"])
    loading.check_registered(saved, ["Counter"] * 3)  # its part raises
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_1\.pkl, and .* 1 objects \(Counter\)"):
        loading.check_registered(saved, ["Counter"])
    (tmp_path / "custom_checkpoint_0.pkl").touch()
    with pytest.raises(RuntimeError, match=r"0 objects \(none\)"):  # the checkpoint of other software
        loading.check_registered(CheckpointReader(tmp_path), [])


@pytest.mark.parametrize(
    ("folder", "faults", "kind", "text"),
    [
        ("x", [f"x: {loading.NO_FOLDER}"], ConfigurationError, "pass a folder that was saved to"),
        ("x", ["x: a is missing"], CheckpointError, "not loaded, and nothing was changed. x: a is missing"),
        (None, ["y: cut off"], CheckpointError, r"no complete checkpoint .* y: cut off\. .*load_state\("),
        (None, [], CheckpointError, "none was saved under automatic naming"),
    ],
)
def test_without_a_checkpoint_the_error_gives_the_reason(
    folder: Any, faults: list[str], kind: type[Exception], text: str
) -> None:
    error = nothing_to_load(folder, faults)
    assert isinstance(error, kind)
    assert isinstance(error, FileNotFoundError) == (folder is None and not faults or "missing" in text)
    with pytest.raises(kind, match=f"(?i){text}"):
        raise error


def read_all(
    opened: Iterator[CheckpointSource], act: Callable[[int, CheckpointSource], None]
) -> tuple[list[str], list[str]]:
    """Read checkpoints as `load_state` does; what was read, and the result of each attempt.

    Args:
        opened: the candidates.
        act: called with the number of the try while the checkpoint is read.
    """
    said = []
    for number, source in enumerate(opened):
        act(number, source)
        said.append(agree(source))
        if not said[-1]:
            return [
                path.read_text() for path in sorted(source.folder.iterdir()) if path.suffix != ".json"
            ], said
    return [], said


def replace(folder: Path, **names: str) -> None:
    """Save to a name as another run does."""
    staging = plan_staging_folder(folder)
    staging.open()
    for name, text in names.items():
        (staging.folder / name).write_text(text)
    Manifest({name: seal(staging.folder, name) for name in names}, 1).write(staging.folder)
    staging.publish()
    staging.discard()


@pytest.mark.parametrize("inside", [True, False])
def test_a_checkpoint_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    monkeypatch.setattr(loading.folder, "_has_mount_point", lambda path: inside)
    folder = make(tmp_path / "one", a="1", b="1")

    def act(number: int, source: CheckpointSource) -> None:
        if number == 0:
            replace(folder, a="2", b="2")

    opened = loading.open_checkpoint(folder, Consensus(), ALONE, 1.0)
    found, said = read_all(opened, act)
    assert found == ["2", "2"]
    assert said == [f"{loading.REPLACED}: load it when no other run saves to this name", ""]


def test_a_checkpoint_replaced_at_every_attempt_is_an_error(tmp_path: Path) -> None:
    folder = make(tmp_path / "one", a="0")
    opened = loading.open_checkpoint(folder, Consensus(), ALONE, 1.0)
    found, said = read_all(opened, lambda number, source: replace(folder, a=str(number + 1)))
    assert found == []
    assert len(said) == loading.ATTEMPTS
    assert loading.REPLACED in said[-1]


def test_a_checkpoint_of_other_software_is_read_again_when_a_save_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "model.safetensors").write_text("old")

    def act(number: int, source: CheckpointSource) -> None:
        if number == 0:
            replace(folder, a="new")

    assert read_all(loading.open_checkpoint(folder, Consensus(), ALONE, 1.0), act)[0] == ["new"]


def test_a_checkpoint_deleted_while_it_is_read_is_replaced_by_a_newer_one(tmp_path: Path) -> None:
    make(tmp_path / "checkpoint_1", a="1")

    def act(number: int, source: CheckpointSource) -> None:
        if number == 0:
            replace(tmp_path / "checkpoint_2", a="2")
            remove(tmp_path / "checkpoint_1")

    assert read_all(loading.open_newest(tmp_path, Consensus(), ALONE, 1.0), act)[0] == ["2"]


def test_a_checkpoint_deleted_before_it_is_opened_is_replaced_by_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "checkpoint_1", a="1")
    survey, calls = retention.survey, []

    def look(parent: Path) -> list[retention.NumberedCheckpoint]:
        found = survey(parent)
        calls.append(parent)
        if len(calls) == 1:
            replace(tmp_path / "checkpoint_2", a="2")
            remove(tmp_path / "checkpoint_1")
        return found

    monkeypatch.setattr(retention, "survey", look)
    opened = loading.open_newest(tmp_path, Consensus(), ALONE, 1.0)
    assert read_all(opened, lambda number, source: None)[0] == ["2"]


class Pair(Consensus):
    """Two ranks; `other` is what the other rank answers."""

    size = 2

    def __init__(self, other: dict[str, Any]) -> None:
        self.other = other

    def decide(self, operation: str, value: Any, reduce_fn: Any, timeout: float) -> Any:
        other = {**value, **self.other} if isinstance(value, dict) else value
        return reduce_fn([value, other])


def test_ranks_that_find_different_saves_read_again_and_then_name_each_other(tmp_path: Path) -> None:
    folder = make(tmp_path / "one", a="1")
    consensus = Pair({"save": "another"})
    opened = loading.open_checkpoint(folder, consensus, ALONE, 1.0)
    found, said = read_all(opened, lambda number, source: None)
    assert found == []
    assert len(said) == loading.ATTEMPTS
    assert "rank 1 finds another save under this name than rank 0" in said[-1]
    (again,) = [agree(CheckpointSource(folder, Pair({"path": "other", "save": "x"}), ALONE))]
    assert again == ""  # copies on two machines


def test_a_checkpoint_that_one_rank_sees_replaced_is_read_again_on_all(tmp_path: Path) -> None:
    folder = make(tmp_path / "one", a="1")
    source = CheckpointSource(
        folder, Pair({"replaced": True, "problems": ["a is missing"]}), ALONE, is_last=False
    )
    assert agree(source).startswith(loading.REPLACED)
    assert source.was_replaced


def test_a_save_after_all_files_were_read_is_detected(tmp_path: Path) -> None:
    folder = make(tmp_path / "one", a="1")
    source = CheckpointSource(folder, Consensus(), ALONE)
    assert agree(source) == ""
    replace(folder, a="2")
    source.agree(was_read=False)
    with pytest.raises(CheckpointError, match=loading.REPLACED):
        source.confirm()


def source(step: Any = 3, run: Any = None) -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(step=step, run={} if run is None else run))


def test_progress_is_read_from_the_manifest(tmp_path: Path) -> None:
    run = {"sync_gradients": False, "num_steps": 2, "updates": [4, 5], "gradient_order": [[1, 0], []]}
    counters = {"updates": [4, 5], "updates_at_call": []}
    assert read_progress(source(3, run), CheckpointReader(tmp_path)) == RunProgress(
        3, False, [[1, 0], []], counters
    )
    assert read_progress(source(), CheckpointReader(tmp_path)) == RunProgress(3, True)


@pytest.mark.parametrize(("content", "step"), [({"step": 4}, 4), ({"step": "4"}, None), ([1], None)])
def test_the_step_is_read_from_checkpoints_of_other_software(
    tmp_path: Path, content: Any, step: int | None
) -> None:
    torch.save(content, tmp_path / "random_states_0.pkl")
    other: Any = SimpleNamespace(manifest=None)
    assert read_progress(other, CheckpointReader(tmp_path)) == RunProgress(step)
    assert read_progress(other, CheckpointReader(tmp_path / "none")) == RunProgress()
