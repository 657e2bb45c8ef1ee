"""Messages about mistakes that new users make on the command line and in scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate import Accelerator, __version__
from accelerate.monitoring import RunTimes
from accelerate.utils import ProjectConfiguration

ACCELERATE = [sys.executable, "-m", "accelerate.commands"]
LAUNCH = [*ACCELERATE, "launch", "--cpu", "--quiet"]
SECONDS = 120


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)


def write(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return name


def test_the_version_is_printed(tmp_path: Path) -> None:
    ended = run([*ACCELERATE, "--version"], tmp_path)
    assert (ended.returncode, ended.stdout.split()) == (0, ["accelerate", __version__])


@pytest.mark.parametrize(
    ("text", "is_noted"),
    [
        ("print(1)", True),
        ("from accelerate import PartialState; PartialState()", False),
        ("import os; print(os.environ['RANK'])", False),
        ("import torch.distributed as dist; dist.init_process_group('gloo')", False),
    ],
)
def test_processes_that_do_the_same_work_are_noted(tmp_path: Path, text: str, is_noted: bool) -> None:
    ended = run([*LAUNCH, "--num_processes", "2", write(tmp_path, text)], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("2 processes did the same work") == is_noted


@pytest.mark.parametrize(
    ("text", "flag", "is_noted"),
    [
        ("print(1)", "--num_processes=2", True),
        ("'--num_processes'", "--num_processes=2", False),
        ("'HfArgumentParser'", "--mixed_precision=bf16", False),
        ("print(1)", "--lr=2", False),
    ],
)
def test_flags_after_the_script_are_noted(tmp_path: Path, text: str, flag: str, is_noted: bool) -> None:
    ended = run([*LAUNCH, write(tmp_path, text), flag], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ("after the script" in ended.stderr) == is_noted


@pytest.mark.parametrize(
    "helper",
    [
        "import torch.distributed as dist; dist.init_process_group('gloo'); dist.destroy_process_group()",
        "import os; print(os.environ['RANK'])",
    ],
)
def test_processes_that_an_imported_module_connects_are_not_noted(tmp_path: Path, helper: str) -> None:
    write(tmp_path, helper, "helper.py")
    ended = run([*LAUNCH, "--num_processes", "2", write(tmp_path, "import helper")], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "the same work" not in ended.stderr


def test_flags_that_an_imported_module_reads_are_not_noted(tmp_path: Path) -> None:
    write(tmp_path, "'--mixed_precision'", "config/options.py")
    script = write(tmp_path, "from config import options")
    ended = run([*LAUNCH, script, "--mixed_precision", "bf16"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "after the script" not in ended.stderr


def test_arguments_like_abbreviated_flags_reach_the_script(tmp_path: Path) -> None:
    words = ["--r", "8", "--no", "-n", "3", "--log=x"]
    script = write(tmp_path, "import sys; print(sys.argv[1:], end='')")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    for count in (1, 2):
        command = [*LAUNCH, "--num_processes", str(count), script, *words]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert ended.stdout == count * str(words)
    assert [path.name for path in temporary.iterdir() if path.name.startswith("torchelastic")] == []


@pytest.mark.parametrize("command", ["launch", "verify"])
@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("absent.py", "There is no script 'absent.py' here."),
        ("folder", "'folder' is a folder without __main__.py."),
        ("-m folder/train.py", "'folder/train.py' is a path, and --module takes a name with dots"),
    ],
)
def test_a_script_that_does_not_exist_is_not_started(
    tmp_path: Path, command: str, script: str, text: str
) -> None:
    (tmp_path / "folder").mkdir()
    ended = run([*ACCELERATE, command, "--cpu", "--num_processes", "2", *script.split()], tmp_path)
    assert ended.returncode == 2
    assert text in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_module_that_a_package_on_disk_lacks_is_not_to_be_installed(tmp_path: Path) -> None:
    write(tmp_path, "", "pkg/train.py")
    ended = run([*LAUNCH, "-m", "pkg.trian"], tmp_path)
    assert ended.returncode == 1
    assert "has no module trian. The nearest name is pkg.train." in ended.stderr
    assert "pip" not in ended.stderr


def test_tracebacks_of_scripts_have_no_frames_of_the_package(tmp_path: Path) -> None:
    text = (
        "import torch; from torch import nn; from accelerate import Accelerator\n"
        "class Model(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x)[9]\n"
        "model = Accelerator(cpu=True).prepare(Model(2, 2))\n"
        "model(torch.ones(1, 2))\n"
    )
    ended = run([*LAUNCH, "--num_processes", "2", write(tmp_path, text)], tmp_path)
    assert "return super().forward(x)[9]" in ended.stderr
    assert f"{os.sep}src{os.sep}accelerate{os.sep}" not in ended.stderr.partition("Exit code")[0]


def test_an_interrupted_run_names_its_newest_checkpoint(tmp_path: Path) -> None:
    text = (
        "import torch, time; from accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "model = accelerator.prepare(torch.nn.Linear(2, 2))\n"
        "accelerator.save_state('saved'); print('saved', flush=True); time.sleep(60)\n"
    )
    command = [*LAUNCH, write(tmp_path, text)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "saved\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=SECONDS)
    assert child.returncode == 130
    assert "The newest checkpoint of step 0 is saved" in err


@pytest.mark.usefixtures("states")
def test_a_folder_that_is_not_used_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.save_state()
    assert "Leave the folder out" not in caplog.text
    accelerator.save_state("mine")
    assert "save_state('mine') saves to a numbered folder" in caplog.text


@pytest.mark.usefixtures("states")
def test_a_tracker_without_its_library_is_noted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr("accelerate.tracking.WandBTracker.available", classmethod(lambda cls: False))
    accelerator.get_tracker("wandb")
    assert "wandb is not installed. Run `pip install wandb`" in caplog.text


def test_step_times_are_printed_as_a_table() -> None:
    lines = str(RunTimes()).splitlines()
    assert lines[0].split() == ["run", "last", "window"]
    assert lines[1].split() == ["steps", "0", "0"]
    assert len({len(line) for line in lines}) == 1
