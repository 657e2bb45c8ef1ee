"""Replica groups continue when others end, with the weights of a run without failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from accelerate.monitoring import find_records
from accelerate.report.reading import read_run

pytest.importorskip("torchft")

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0"]
SECONDS = 240
SCRIPT = '''
"""Trains, evaluates and saves, and ends itself once where the test says."""
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import ProjectConfiguration

folder, kind = Path(os.environ["FOLDER"]), os.environ["KIND"]
failure = json.loads(os.environ.get("FAILURE", "{}"))
replica = int(os.environ.get("ACCELERATE_REPLICA", "0"))
torch.manual_seed(replica)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    fsdp_plugin=plugin if kind == "fsdp" else None,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    parallelism_config=ParallelismConfig(tp_size=2) if kind == "tp" else None,
    log_with="report",
    project_config=ProjectConfiguration(folder / "project", automatic_checkpoint_naming=True),
)


def fail(where, number):
    """Ends this process once at a place, as the test says."""
    if failure.get("where") != where or number != failure["number"]:
        return
    is_all = failure["replica"] == "all"
    if not is_all and replica != failure["replica"]:
        return
    if accelerator.process_index != failure.get("rank", 0):
        return
    try:
        (folder / (f"failed-{replica}" if is_all else "failed")).touch(exist_ok=False)
    except FileExistsError:
        return
    if where == "exit":
        sys.exit(3)
    if where == "asked":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    os.kill(os.getpid(), signal.SIGKILL)


model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
model.tp_plan = {"0": "colwise", "2": "rowwise"}
torch.manual_seed(3)  # of the order of the samples
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
step, counter = optimizer.step, [0]


def counted_step(*args, **kwargs):
    counter[0] += 1
    fail("step", counter[0])
    return step(*args, **kwargs)


optimizer.step = counted_step
generator = torch.Generator().manual_seed(0)
data = [(torch.randn(8, generator=generator), number % 4, number) for number in range(72)]
loader, evaluation = DataLoader(data, batch_size=3, shuffle=True), DataLoader(data[:22], batch_size=3)
model, optimizer, scheduler, loader, evaluation = accelerator.prepare(
    model, optimizer, scheduler, loader, evaluation
)
done = len(list((folder / "project").glob("checkpoints/*"))) if os.environ.get("LOADS") else 0
done = done or len(os.environ.get("RESUME", ""))
if done:
    accelerator.load_state()
with accelerator.main_process_first():
    if accelerator.is_main_process:
        time.sleep(0.3)
        (folder / "downloaded").touch()
    assert (folder / "downloaded").exists()
accelerator.init_trackers("test", {"lr": 0.01})
if (folder / "failed").exists():
    (folder / "started again").touch()
accelerator.register_save_state_pre_hook(lambda *_: fail("save", 1))
log, samples = open(folder / f"samples-{replica}-{os.getpid()}.jsonl", "a", buffering=1), []
report, pause = [], float(os.environ.get("PAUSE", "0"))
longest = int(os.environ.get("LONGEST", "1000"))  # number of steps after which a pass is left
for epoch in range(done, 3):
    num_steps = 0
    for number, (rows, labels, numbers) in enumerate(loader):
        while "WAITS" in os.environ and (epoch, number) == (2, 0) and not (folder / "started again").exists():
            time.sleep(0.1)
        samples += numbers.tolist()
        fail("batch", 10 * epoch + number)
        fail("exit", 10 * epoch + number)
        fail("asked", 10 * epoch + number)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.register_hook(lambda gradient: fail("backward", 10 * epoch + number))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                time.sleep(pause)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            if not accelerator.optimizer_step_was_skipped:
                num_steps += 1
                accelerator.log({"rate": scheduler.get_last_lr()[0]}, step=optimizer.num_updates)
                log.write(json.dumps([epoch, samples]) + "\\n")
            samples = []
        if accelerator.should_save:
            accelerator.save_state()
        if accelerator.should_stop or num_steps == longest:
            break
    if accelerator.should_stop:
        break
    if accelerator.is_main_process:
        time.sleep(0.5)
        (folder / f"pass-{epoch}").touch()
    accelerator.wait_for_everyone()
    assert (folder / f"pass-{epoch}").exists()
    model.eval()
    found = []
    with torch.no_grad():
        for rows, labels, numbers in evaluation:
            fail("evaluation", epoch)
            found.append(accelerator.gather_for_metrics(numbers))
    model.train()
    report.append(sorted(torch.cat(found).tolist()) == list(range(22)))
    accelerator.save_state()
weights = accelerator.get_state_dict(model)
if accelerator.process_index == 0 and optimizer.num_updates:  # it joined before the end of the others
    torch.save((weights, report, scheduler.get_last_lr()), folder / f"end-{replica}.pt")
'''


class Outcome(NamedTuple):
    weights: list[dict[str, Any]]
    reports: list[list[bool]]
    rates: list[list[float]]
    err: str


def launch(folder: Path, *options: str, kind: str = "ddp", **variables: str) -> Outcome:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "FOLDER": str(folder), "KIND": kind, "OMP_NUM_THREADS": "1", **variables}
    ended = subprocess.run(
        [*LAUNCH, *options, str(script)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    ends = [torch.load(path) for path in sorted(folder.glob("end-*.pt"))]
    weights, reports, rates = ([end[index] for end in ends] for index in range(3))
    return Outcome(weights, reports, rates, ended.stderr)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The result of DistributedDataParallel on two processes, without replica groups."""
    return launch(tmp_path_factory.mktemp("plain"), "--num_processes", "2")


def read_records(folder: Path) -> list[list[dict[str, Any]]]:
    """Returns the records of each process of all replica groups."""
    paths = [records.path for records in find_records(folder / "project")]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found.weights
    for weights, rates in zip(found.weights, found.rates, strict=True):
        assert rates == pytest.approx(expected.rates[0])
        for name, value in expected.weights[0].items():
            torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=1e-6)
            assert torch.equal(weights[name], found.weights[0][name])


def failing(where: str, number: int, **more: Any) -> str:
    return json.dumps({"where": where, "number": number, "replica": 1, **more})


FAILURES = [
    failing("batch", 13),
    failing("batch", 0),
    failing("exit", 5),
    failing("backward", 11),
    failing("step", 5),
    failing("batch", 13, replica=0),
    failing("batch", 0, replica=0),
    failing("backward", 1, replica=0),
    failing("step", 12, replica=0),
    failing("save", 1, replica=0),
]


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
def test_weights_are_those_without_a_failure(tmp_path: Path, expected: Outcome, failure: str) -> None:
    found = launch(tmp_path, "--replicas", "2", FAILURE=failure, PAUSE="0.2", WAITS="yes")
    assert_equal(found, expected)
    assert "and is started again" in found.err
    assert "Traceback" not in found.err


@pytest.mark.slow
@pytest.mark.parametrize("loads", ["", "yes"])
@pytest.mark.parametrize("number", [3, 13])
def test_a_run_begins_again_if_all_groups_end_at_once(
    tmp_path: Path, expected: Outcome, loads: str, number: int
) -> None:
    found = launch(tmp_path, "--replicas", "2", FAILURE=failing("batch", number, replica="all"), LOADS=loads)
    assert_equal(found, expected)
    assert len(found.weights) == 2
    assert found.err.count("and is started again") == 2


SHORT = """
import os, pathlib, signal, torch
from accelerate import Accelerator

accelerator, net = Accelerator(cpu=True), torch.nn.Linear(2, 2)
loader = torch.utils.data.DataLoader(torch.randn(32, 2), batch_size=2)
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader)
marker = pathlib.Path(__file__).with_name("failed")
for number, batch in enumerate(loader):
    FAILURE
    loss = net(batch).sum()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
"""


def run_short_script(folder: Path, failure: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SHORT.replace("FAILURE", failure))
    words = [*LAUNCH, "--replicas", "2", str(script)]
    return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.slow
def test_an_error_that_all_groups_raise_after_one_step_ends_the_run(tmp_path: Path) -> None:
    ended = run_short_script(tmp_path, "assert number < 3")
    assert ended.returncode == 1
    assert "ended 3 times after step 3" in ended.stderr


@pytest.mark.slow
def test_a_group_that_starts_again_after_the_last_step_does_not_fail_the_run(tmp_path: Path) -> None:
    last = "os.environ['ACCELERATE_REPLICA'] == '1' and number == 7 and not marker.exists()"
    ended = run_short_script(tmp_path, f"if {last}: marker.touch(); os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.returncode == 0, ended.stderr
    # It is started again, unless the other group ends before its launcher does.
    assert "and had no step of its own" in ended.stderr or "which took its last steps" in ended.stderr


@pytest.mark.slow
def test_trackers_and_records_continue_in_another_group(tmp_path: Path) -> None:
    launch(tmp_path, "--replicas", "2", FAILURE=failing("batch", 13, replica=0), PAUSE="0.5")
    records = read_records(tmp_path)
    starts = [[each for each in rank if each["kind"] == "start"] for rank in records]
    assert len(starts[1]) == 1
    assert [(rank[0]["rank"], rank[0]["world_size"]) for rank in starts] == [(0, 2), (1, 2)]
    logged = [[each["step"] for each in rank if each["kind"] == "values"] for rank in records]
    assert all(logged)
    assert sorted(logged[0] + logged[1]) == list(range(1, 19))
    members = [each["text"][:6] for each in records[1] if each.get("name") == "members"]
    assert members[:2] == ["2 of 2", "1 of 2"]
    goodput = read_run(tmp_path / "project").goodput()
    assert goodput is not None
    assert goodput.seconds_by["members"] > 0
    assert goodput.wall == pytest.approx(sum(goodput.seconds_by.values()))


@pytest.mark.slow
def test_all_groups_save_and_stop_at_the_request_of_one(tmp_path: Path) -> None:
    found = launch(tmp_path, "--replicas", "2", FAILURE=failing("asked", 3), PAUSE="0.3")
    first, second = found.weights
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert found.reports == [[], []]
    assert (tmp_path / "project" / "checkpoints" / "checkpoint_0").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("batch", 13),
        ("exit", 13),  # leaves a pass, which the others continue
        pytest.param("batch", 22, id="last"),
    ],
)
def test_a_pass_that_a_loop_leaves_is_over_for_all_groups(tmp_path: Path, where: str, number: int) -> None:
    expected = launch(tmp_path / "plain", "--num_processes", "2", LONGEST="4")
    found = launch(
        tmp_path / "failed", "--replicas", "2", FAILURE=failing(where, number), PAUSE="1.0", LONGEST="4"
    )
    assert_equal(found, expected)
    assert "and is started again" in found.err
    assert "gathered values" not in found.err


@pytest.mark.slow
def test_a_batch_that_shrinks_has_each_sample_once(tmp_path: Path) -> None:
    options = ("--replicas", "3", "--min_replicas", "2", "--replica_batch", "shrink")
    found = launch(tmp_path, *options, FAILURE=failing("batch", 13), PAUSE="0.3")
    lines = [line for path in tmp_path.glob("samples-*.jsonl") for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    for epoch in range(3):
        trained = sorted(sample for number, samples in records if number == epoch for sample in samples)
        assert trained == list(range(72))
    assert all(torch.equal(weights["0.weight"], found.weights[0]["0.weight"]) for weights in found.weights)
    assert "and is started again" in found.err


@pytest.mark.slow
def test_an_evaluation_continues_without_a_member(tmp_path: Path, expected: Outcome) -> None:
    failure = failing("evaluation", 1)
    found = launch(tmp_path, "--replicas", "2", FAILURE=failure, PAUSE="0.2", WAITS="yes")
    assert_equal(found, expected)
    assert "gathered values and metrics are those of each replica group" in found.err
    assert found.reports[0] == [True, False, True]  # the group that was started again saw parts only


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_groups_of_several_processes_continue(tmp_path: Path, kind: str) -> None:
    wanted = launch(tmp_path / "plain", "--num_processes", "4", kind=kind)
    words = ("--replicas", "2", "--num_processes", "4")
    options = ("--use_fsdp", "--fsdp_version", "2") if kind == "fsdp" else ()
    failure = failing("batch", 11, rank=1)
    found = launch(tmp_path / "groups", *words, *options, kind=kind, FAILURE=failure, PAUSE="0.2")
    assert_equal(found, wanted)


@pytest.mark.slow
def test_groups_with_tensor_parallelism_continue(tmp_path: Path, expected: Outcome) -> None:
    words = ("--replicas", "2", "--num_processes", "4")
    found = launch(tmp_path, *words, kind="tp", FAILURE=failing("batch", 11, rank=1), PAUSE="0.2")
    assert_equal(found, expected)


@pytest.mark.slow
def test_a_signal_ends_all_replica_groups(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, time\n"
        "(pathlib.Path(__file__).parent / f\"pid-{os.environ['ACCELERATE_REPLICA']}\").touch()\n"
        "time.sleep(600)\n"
    )
    launched = subprocess.Popen([*LAUNCH, "--replicas", "2", str(script)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("pid-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(launched.pid).children(recursive=True)
    launched.terminate()
    _, err = launched.communicate(timeout=60)
    assert launched.returncode == 128 + signal.SIGTERM, err
    assert "Traceback" not in err
    assert len(family) >= 4
    assert not [process for process in family if process.is_running()]


@pytest.mark.slow
def test_an_error_after_the_end_of_others_is_not_hidden(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\ndone = pathlib.Path(__file__).parent / 'done'\n"
        "if os.environ['ACCELERATE_REPLICA'] == '0': done.touch(); sys.exit(0)\n"
        "while not done.exists(): time.sleep(0.05)\ntime.sleep(2)\nsys.exit(7)\n"
    )
    command = [*LAUNCH, "--replicas", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 7
    assert "replica group 1 ended with exit code 7 after another group was done" in ended.stderr


@pytest.mark.slow
def test_checkpoints_resume_a_run(tmp_path: Path, expected: Outcome) -> None:
    launch(tmp_path, "--replicas", "2")
    checkpoints = tmp_path / "project" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"checkpoint_{n}" for n in range(3)]
    for number in (1, 2):
        for path in sorted((checkpoints / f"checkpoint_{number}").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (checkpoints / f"checkpoint_{number}").rmdir()
    assert_equal(launch(tmp_path, "--replicas", "2", RESUME="1"), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replicas", "3", "--num_processes", "4"), "--replicas=3: --num_processes 4 do not divide"),
        (("--replicas", "2", "--min_replicas", "3"), "--min_replicas=3: there are 2 replica groups"),
        (("--replicas", "3", "--num_machines", "2"), "--replicas=3: 2 machines cannot have equally many"),
    ],
)
def test_wrong_numbers_are_refused(options: tuple[str, ...], message: str) -> None:
    ended = subprocess.run(
        [*LAUNCH, *options, "script.py"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
