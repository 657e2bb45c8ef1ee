from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import ConfigurationError, LaunchError, current, patch_environment
from accelerate.launch import LaunchPlan, Machine, Target, resolve_plan
from accelerate.launch.backends import launcher_for
from accelerate.settings import FLAG, Layer, merge_layers

TARGET = Target("script", "train.py", ("--lr", "a b"))
ALLOCATION = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "gpu[07-08],login",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
    "SLURM_GPUS_ON_NODE": "4",
}


def made(facts: dict[str, str] = ALLOCATION, target: Target = TARGET, **more: Any) -> LaunchPlan:
    settings = merge_layers(Layer(FLAG, {"slurm": True, "cpu": True, **more}))
    return resolve_plan(settings, Machine(environ=facts), target)[0]


def agent_of(plan: LaunchPlan) -> str:
    return launcher_for(plan).command(plan)[-1]


def test_addresses_and_counts_are_those_of_the_allocation() -> None:
    plan = made()
    assert (plan.launcher, plan.machines, plan.processes) == ("slurm", 3, 12)
    assert (plan.address, plan.port) == ("gpu07", 12041)


def test_flags_override_the_allocation() -> None:
    plan = made(num_machines=2, num_processes=2, main_process_ip="10.0.0.1", main_process_port=5)
    assert (plan.machines, plan.processes) == (2, 2)
    assert (plan.address, plan.port) == ("10.0.0.1", 5)


@pytest.mark.parametrize(
    ("facts", "processes"),
    [
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_NTASKS_PER_NODE": "3"}, 3),
        ({}, 1),
    ],
)
def test_processes_follow_from_devices_then_tasks(facts: dict[str, str], processes: int) -> None:
    kept = {name: text for name, text in ALLOCATION.items() if "GPUS" not in name}
    assert made({**kept, **facts}).local_processes == processes


def test_srun_starts_one_agent_on_each_machine() -> None:
    plan = made(slurm_options="--qos=high --exclusive", mixed_precision="bf16")
    words = launcher_for(plan).command(plan)
    expected = "srun --nodes 3 --ntasks 3 --ntasks-per-node 1 --cpus-per-task 8 --kill-on-bad-exit=1"
    assert words[:-1] == [*expected.split(), "--qos=high", "--exclusive", "sh", "-c"]
    assert words[-1] == (
        f"exec {sys.executable} -m accelerate.commands.launch --quiet --cpu --num_processes=12 "
        "--num_machines=3 --mixed_precision=bf16 --main_process_ip=gpu07 --main_process_port=12041 "
        "--no_slurm --machine_rank \"$SLURM_NODEID\" train.py --lr 'a b'"
    )


def test_one_machine_needs_no_rank() -> None:
    plan = made({**ALLOCATION, "SLURM_JOB_NUM_NODES": "1"})
    assert "--machine_rank 0 train.py" in agent_of(plan)


@pytest.mark.parametrize(
    ("target", "end"),
    [
        (Target("module", "a.b", ("1",)), "--module a.b 1"),
        (Target("program", "./a", ("1",)), "--no_python ./a 1"),
    ],
)
def test_modules_and_programs_keep_their_kind(target: Target, end: str) -> None:
    assert agent_of(made(target=target)).endswith(f'--machine_rank "$SLURM_NODEID" {end}')


def test_more_machines_than_the_allocation_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--num_machines=4: the allocation has 3"):
        made(num_machines=4)


def test_slurm_of_a_file_is_used_inside_an_allocation() -> None:
    layer = Layer("c.yaml", {"slurm": True, "num_machines": 1, "cpu": True})
    plan, _ = resolve_plan(merge_layers(layer), Machine(environ=ALLOCATION), TARGET)
    assert (plan.launcher, plan.machines) == ("slurm", 3)


def submission(tmp_path: Path, **more: Any) -> LaunchPlan:
    options = "--partition=gpu --comment='my run' --time 60"
    return made(
        {},
        submit=True,
        num_machines=2,
        mixed_precision="bf16",
        slurm_options=options,
        slurm_script=str(tmp_path / "job.sbatch"),
        **more,
    )


def test_the_batch_script_launches_inside_of_its_allocation(tmp_path: Path) -> None:
    plan = submission(tmp_path)
    (text,) = launcher_for(plan).files(plan).values()
    assert text.splitlines() == [
        "#!/bin/sh",
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --partition=gpu",
        "#SBATCH --comment='my run'",
        "#SBATCH --time 60",
        f"exec {sys.executable} -m accelerate.commands.launch --quiet --cpu --mixed_precision=bf16 --slurm "
        "train.py --lr 'a b'",
    ]


def put_sbatch(folder: Path, text: str) -> str:
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"{program.parent}:{current()['PATH']}"


def test_path_and_number_of_the_job_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = submission(tmp_path)
    with patch_environment(PATH=put_sbatch(tmp_path, 'grep -q "nodes=2" "$2" && echo "17;cluster"')):
        assert launcher_for(plan).run(plan) == 0
    assert capsys.readouterr().out == f"Submitted {tmp_path / 'job.sbatch'} as job 17.\n"


def test_a_job_that_slurm_does_not_take_is_one_clear_error(tmp_path: Path) -> None:
    plan = submission(tmp_path)
    programs = put_sbatch(tmp_path, "echo 'no such partition' >&2; exit 1")
    refused = pytest.raises(LaunchError, match="sbatch did not accept .*job.sbatch: no such partition")
    with patch_environment(PATH=programs), refused:
        launcher_for(plan).run(plan)


def test_a_machine_without_sbatch_is_one_clear_error(tmp_path: Path) -> None:
    plan = submission(tmp_path)
    refused = pytest.raises(ConfigurationError, match="sbatch cannot be used: No such file")
    with patch_environment(PATH=str(tmp_path)), refused:
        launcher_for(plan).run(plan)
