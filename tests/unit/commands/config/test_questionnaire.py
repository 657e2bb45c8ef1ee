"""`accelerate config` in a terminal and from a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from accelerate.commands.config import cluster, sagemaker
from accelerate.commands.config.cluster import get_cluster_input, suggest
from accelerate.commands.config.config import get_user_input
from accelerate.commands.config.sagemaker import get_sagemaker_input
from accelerate.devices import CPU, CUDA
from accelerate.launch import Machine
from accelerate.settings import (
    SCHEMA_FILE,
    ClusterConfig,
    SageMakerConfig,
    all_options,
    config_file,
    load_config_from_file,
    merge_layers,
)
from accelerate.settings.sections import EXCLUSIVE, PARADIGM_OF_TYPE

COMMAND = [sys.executable, "-m", "accelerate.commands.config"]
DOWN, ENTER = "\x1b[B", "\r"
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")
PATIENCE = 60.0


class Terminal:
    """A program in a pseudo-terminal of 40 lines and 160 columns."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        variables = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=variables, cwd=folder, close_fds=True
        )
        os.close(slave)
        self.seen = ""

    def expect(self, text: str) -> None:
        """Read until a text appears; what came before it is forgotten."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} did not come; the screen has: {self.seen}"
            self._read()
        self.seen = self.seen.partition(text)[2]

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def finish(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)

    def _read(self) -> None:
        ready, _, _ = select.select([self.master], [], [], 1.0)
        if not ready:
            return
        try:
            more = os.read(self.master, 4096).decode(errors="replace")
        except OSError:  # the program has ended
            raise AssertionError(f"the program ended; the screen has: {self.seen}") from None
        self.seen += CONTROLS.sub("", more)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal([*COMMAND, "--config_file", "deep/c.yaml"], tmp_path)
    yield opened
    opened.close()


def test_in_a_terminal_with_arrow_keys(terminal: Terminal, tmp_path: Path) -> None:
    terminal.expect("Where does the script run?")
    terminal.type(ENTER)
    terminal.expect("Which training strategy")
    terminal.type(DOWN + DOWN + ENTER)  # NO, MULTI_GPU, MULTI_CPU
    terminal.expect("How many processes in total")
    terminal.type("\b" * 3 + "zwei" + ENTER)
    terminal.expect("must be a whole number")
    terminal.type("\b" * 4 + "2" + ENTER)
    terminal.expect("How many machines take part?")
    terminal.type(ENTER)
    terminal.expect("Which mixed precision?")
    terminal.type(DOWN + DOWN + ENTER)  # no, fp16, bf16
    terminal.expect("advanced settings")
    terminal.type("n")
    terminal.expect("mixed_precision: bf16")
    terminal.expect("num_processes: 2")
    terminal.expect("Write this to deep/c.yaml?")
    assert not (tmp_path / "deep").exists()
    terminal.type(ENTER)
    terminal.expect("The configuration was written to deep/c.yaml")
    assert terminal.finish() == 0
    written = load_config_from_file(str(tmp_path / "deep" / "c.yaml"))
    assert isinstance(written, ClusterConfig)
    assert (written.distributed_type, written.num_processes) == ("MULTI_CPU", 2)
    assert (written.mixed_precision, written.use_cpu) == ("bf16", True)


def test_the_last_page_can_end_without_writing(terminal: Terminal, tmp_path: Path) -> None:
    for question in ("Where does the script run?", "Which training strategy"):
        terminal.expect(question)
        terminal.type(ENTER)
    terminal.expect("Run on CPU only")
    terminal.type("y")
    terminal.expect("Which mixed precision?")
    terminal.type(ENTER)
    terminal.expect("advanced settings")
    terminal.type("n")
    terminal.expect("Write this to deep/c.yaml?")
    terminal.type(DOWN + DOWN + ENTER)
    terminal.expect("Nothing was written.")
    assert terminal.finish() == 0
    assert not (tmp_path / "deep").exists()


def test_ctrl_c_ends_it(terminal: Terminal) -> None:
    terminal.expect("Where does the script run?")
    terminal.type("\x03")
    assert terminal.finish() == 130


def test_ctrl_d_ends_it(terminal: Terminal) -> None:
    terminal.expect("Where does the script run?")
    terminal.type(ENTER)
    terminal.expect("Which training strategy")
    terminal.type(DOWN + ENTER)
    terminal.expect("How many processes in total")
    terminal.type("\x7f" * 4 + "\x04")
    assert terminal.finish() == 130


def answer(lines: list[str], path: Path) -> subprocess.CompletedProcess[str]:
    text = "".join(f"{line}\n" for line in lines)
    command = [*COMMAND, "--config_file", str(path)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE)


def test_from_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    done = answer(["", "fsdp", "4", "", "", "bf16", *[""] * 9, "write"], path)
    assert done.returncode == 0, done.stderr
    assert "Which version of FSDP? [1/2] (2)" in done.stdout
    written = load_config_from_file(str(path))
    assert isinstance(written, ClusterConfig)
    assert (written.distributed_type, written.mixed_precision) == ("FSDP", "bf16")
    assert written.fsdp_config is not None
    assert written.fsdp_config["fsdp_version"] == 2


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["nowhere"], "'nowhere' is not among the answers. Answer with one of LOCAL_MACHINE, AMAZON"),
        (["", "multi_cpu", "two"], "num_processes='two': this must be a whole number"),
        (["", ""], "The input ended before the question"),
    ],
)
def test_a_wrong_pipe_is_one_message(tmp_path: Path, lines: list[str], problem: str) -> None:
    done = answer(lines, tmp_path / "c.yaml")
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "c.yaml").exists()


class Defaults:
    """Accepts every default but the given answers."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def choose(self, text: str, offers: Any, default: str) -> str:
        return str(next((value for part, value in self.answers.items() if part in text), default))

    def confirm(self, text: str, default: bool) -> bool:
        return default

    def write(self, text: str, default: str, check: Any) -> str:
        given = str(next((value for part, value in self.answers.items() if part in text), default))
        check(given)
        return given


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "look", lambda environ, cpu: Machine(CUDA, 4))
    monkeypatch.setattr(cluster.nvidia, "driver_present", lambda: True)
    monkeypatch.setattr(cluster.nvidia, "query", lambda *fields: (("8.0",), ("9.0",)))


@pytest.mark.usefixtures("four_gpus")
def test_the_machine_sets_the_defaults() -> None:
    prompt = Defaults()
    config = get_user_input(prompt, suggest())  # type: ignore[arg-type]
    assert isinstance(config, ClusterConfig)
    assert (config.distributed_type, config.num_processes) == ("MULTI_GPU", 4)
    assert (config.mixed_precision, config.gpu_ids, config.use_cpu) == ("bf16", "all", False)
    assert prompt.said[0].startswith("Found 4 x")
    assert "with bf16" in prompt.said[0]


@pytest.mark.parametrize(
    ("devices", "way", "says"), [(0, "MULTI_GPU", True), (0, "MULTI_CPU", False), (4, "MULTI_GPU", False)]
)
def test_a_training_method_that_cannot_run_on_this_machine_gives_a_note(
    devices: int, way: str, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(CUDA, devices) if devices else Machine(CPU, 1)
    monkeypatch.setattr(cluster, "look", lambda environ, cpu: machine)
    prompt = Defaults(training=way)
    config = get_user_input(prompt, suggest())  # type: ignore[arg-type]
    assert config.distributed_type == way
    assert any(f"refuses {way} here" in line for line in prompt.said) is says


@pytest.mark.usefixtures("four_gpus")
def test_old_gpus_do_not_get_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.nvidia, "query", lambda *fields: (("7.5",),))
    assert suggest().values["mixed_precision"] == "no"


@pytest.mark.usefixtures("four_gpus")
def test_an_allocation_of_slurm_gives_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(
        cluster.environ, "current", lambda: {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}
    )
    known = suggest()
    assert (known.values["num_machines"], known.values["num_processes"]) == (2, 8)
    assert (known.values["main_process_ip"], known.values["slurm"]) == ("gpu07", True)
    assert "an allocation of 2 nodes" in known.facts[1]


def test_an_existing_file_gives_defaults_and_keeps_its_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    mapping = {
        "distributed_type": "FSDP",
        "num_processes": 6,
        "hang_timeout": 60,
        "fsdp_config": {"fsdp_ignored_modules": "head"},
    }
    path.write_text(yaml.safe_dump(mapping))
    config = get_cluster_input(Defaults(), suggest(str(path)))  # type: ignore[arg-type]
    assert (config.distributed_type, config.num_processes) == ("FSDP", 6)
    assert config.to_dict()["hang_timeout"] == 60
    assert config.fsdp_config is not None
    assert config.fsdp_config["fsdp_ignored_modules"] == "head"
    other = get_cluster_input(Defaults(**{"Which training strategy": "MULTI_CPU"}), suggest(str(path)))  # type: ignore[arg-type]
    assert other.fsdp_config == {}


def test_a_broken_file_does_not_stop_the_questionnaire(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_proceses: 2")
    known = suggest(str(path))
    assert known.kept == {}
    assert "is not used" in known.facts[-1]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("way", all_options()["distributed_type"].offers)
def test_every_training_method_gives_a_file_that_loads_and_launches(
    way: str, precision: str, tmp_path: Path
) -> None:
    answers = {
        "Which training strategy": way,
        "mixed precision": precision,
        "How many machines": "2",
        "address": "10.0.0.1",
    }
    config = get_cluster_input(Defaults(**answers), suggest())  # type: ignore[arg-type]
    path = tmp_path / "c.yaml"
    config.to_yaml_file(str(path))
    assert load_config_from_file(str(path)) == config
    schema = json.loads(SCHEMA_FILE.read_text())
    jsonschema.validate(yaml.safe_load(path.read_text()), schema, jsonschema.Draft202012Validator)
    settings = merge_layers(config_file.read_layer(path, "file"))
    assert settings.values["mixed_precision"] == precision
    chosen = [name for name in EXCLUSIVE if settings.values[name]]
    assert chosen == [name for name in [PARADIGM_OF_TYPE[way]] if name]


def test_a_second_questionnaire_starts_from_the_answers(tmp_path: Path) -> None:
    answers = ["", "multi_cpu", "3", "", "bf16", "", "ask again", "", "", "", "", "", "", "write"]
    path = tmp_path / "c.yaml"
    done = answer(answers, path)
    assert done.returncode == 0, done.stderr
    written = load_config_from_file(str(path))
    assert isinstance(written, ClusterConfig)
    assert (written.distributed_type, written.num_processes) == ("MULTI_CPU", 3)
    assert written.mixed_precision == "bf16"


class Iam:
    """The calls of AWS."""

    exceptions = types.SimpleNamespace(EntityAlreadyExistsException=KeyError)

    def __init__(self, roles: list[str]) -> None:
        self.roles = roles
        self.policies: dict[str, Any] = {}

    def create_role(self, **asked: str) -> None:
        if asked["RoleName"] in self.roles:
            raise KeyError(asked["RoleName"])
        assert json.loads(asked["AssumeRolePolicyDocument"])["Statement"][0]["Action"] == "sts:AssumeRole"
        self.roles.append(asked["RoleName"])

    def put_role_policy(self, **asked: str) -> None:
        self.policies[asked["RoleName"]] = json.loads(asked["PolicyDocument"])

    def get_role(self, **asked: str) -> dict[str, Any]:
        return {"Role": {"Arn": f"arn:aws:iam::1:role/{asked['RoleName']}"}}


@pytest.mark.parametrize("there", [True, False])
def test_the_role_of_the_job_is_created_on_request(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    client = Iam(["trainer"] if there else [])
    monkeypatch.setattr(sagemaker, "_iam", lambda: client)
    monkeypatch.setattr(sagemaker, "is_boto3_available", lambda: True)
    prompt = Defaults(**{"IAM role does": "trainer"})
    monkeypatch.setattr(prompt, "confirm", lambda text, default: text == sagemaker.CREATE_ROLE or default)
    config = get_sagemaker_input(prompt)  # type: ignore[arg-type]
    assert config.iam_role_name == "arn:aws:iam::1:role/trainer"
    assert client.roles == ["trainer"]
    assert ("trainer" in client.policies) == (not there)


def test_the_questionnaire_of_sagemaker_sets_the_job() -> None:
    config = get_sagemaker_input(Defaults(**{"instance type": "ml.g5.xlarge", "IAM role": "trainer"}))  # type: ignore[arg-type]
    assert isinstance(config, SageMakerConfig)
    assert (config.ec2_instance_type, config.iam_role_name) == ("ml.g5.xlarge", "trainer")
    assert (config.region, config.mixed_precision) == ("us-east-1", "no")
    chosen = get_user_input(Defaults(**{"Where does": "AMAZON_SAGEMAKER"}), suggest())  # type: ignore[arg-type]
    assert isinstance(chosen, SageMakerConfig)
