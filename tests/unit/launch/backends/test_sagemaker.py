from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from accelerate.base import ConfigurationError, LaunchError, MissingPackageError, clear_environment, current
from accelerate.commands import namespace
from accelerate.commands.launch import launch_command_parser
from accelerate.launch import LaunchPlan, Machine, Target, as_text, resolve_plan
from accelerate.launch.backends import SageMakerDetails, launcher_for
from accelerate.settings import FLAG, Layer, Settings, config_file, load_config_from_file, merge_layers

JOB = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: NO
mixed_precision: bf16
ec2_instance_type: ml.p3.2xlarge
iam_role_name: role
num_machines: 2
region: eu-west-1
profile: mine
sagemaker_inputs_file: inputs.tsv
sagemaker_metrics_file: metrics.tsv
additional_args: {max_run: 60}
"""
FILES = {
    "inputs.tsv": "channel_name\tdata_location\ntrain\ts3://a\n\ntest\ts3://b\n",
    "metrics.tsv": "metric_name\tmetric_regex\nloss\tloss=(.*)\n",
}
KEYS = {"aws_access_key_id": "AKIA-OPEN", "aws_secret_access_key": "HUSH"}
ENVIRONMENT = {
    "ACCELERATE_USE_SAGEMAKER": "true",
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "NO",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
}
ARGUMENTS = {
    "image_uri": None,
    "entry_point": "train.py",
    "source_dir": "src",
    "role": "role",
    "transformers_version": "4.17.0",
    "pytorch_version": "1.10.2",
    "py_version": "py38",
    "base_job_name": "accelerate-sagemaker-1",
    "instance_count": 2,
    "instance_type": "ml.p3.2xlarge",
    "debugger_hook_config": False,
    "distribution": None,
    "hyperparameters": {"lr": 0.1, "fast": True},
    "environment": ENVIRONMENT,
    "metric_definitions": [{"Name": "loss", "Regex": "loss=(.*)"}],
    "max_run": 60,
}
SCRIPT = Target("script", "src/train.py", ("--lr", "0.1", "--fast"))


def made(
    tmp_path: Path, text: str = "", target: Target = SCRIPT, files: dict[str, str] = FILES, **flags: Any
) -> tuple[LaunchPlan, Settings]:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(JOB), **(yaml.safe_load(text) or {})}))
    settings = merge_layers(config_file.read_layer(path, "job.yaml"), Layer(FLAG, {**KEYS, **flags}))
    return resolve_plan(settings, Machine(read_file=lambda name: files[name]), target)


def test_a_job_has_the_settings_of_the_file(tmp_path: Path) -> None:
    plan, settings = made(tmp_path)
    details = plan.detail(SageMakerDetails)
    assert details.arguments == ARGUMENTS
    assert "sagemaker.huggingface.HuggingFace" in as_text(plan, settings)
    assert """'entry_point="train.py"'""" in as_text(plan, settings)
    assert details.inputs == {"train": "s3://a", "test": "s3://b"}
    assert details.credentials == {
        "AWS_PROFILE": "mine",
        "AWS_ACCESS_KEY_ID": "AKIA-OPEN",
        "AWS_SECRET_ACCESS_KEY": "HUSH",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }


def test_data_parallel_jobs_set_the_distribution(tmp_path: Path) -> None:
    details = made(tmp_path, "distributed_type: DATA_PARALLEL")[0].detail(SageMakerDetails)
    assert details.arguments["distribution"] == {"smdistributed": {"dataparallel": {"enabled": True}}}
    assert details.arguments["environment"]["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == "DATA_PARALLEL"


def test_a_custom_image_needs_no_versions(tmp_path: Path) -> None:
    details = made(tmp_path, "image_uri: mine:1")[0].detail(SageMakerDetails)
    versions = ("transformers_version", "pytorch_version", "py_version")
    assert details.arguments["image_uri"] == "mine:1"
    assert [details.arguments[name] for name in versions] == [None] * 3


@pytest.mark.parametrize(
    ("text", "target", "problem"),
    [
        ("distributed_type: MODEL_PARALLEL", SCRIPT, "distributed_type='MODEL_PARALLEL'"),
        ("ec2_instance_type: null", SCRIPT, "ec2_instance_type=None: a job needs it"),
        ("", Target("module", "a.b"), "SageMaker runs a Python file"),
        ("", Target("script", "train.sh"), "SageMaker runs a Python file"),
        ("sagemaker_inputs_file: metrics.tsv", SCRIPT, "the first line names the columns"),
        ("sagemaker_inputs_file: wrong.tsv", SCRIPT, "a row has two cells with a tab between"),
    ],
)
def test_jobs_with_invalid_settings_are_refused(
    tmp_path: Path, text: str, target: Target, problem: str
) -> None:
    files = {**FILES, "wrong.tsv": "channel_name\tdata_location\ntrain s3://a\n"}
    with pytest.raises(ConfigurationError) as caught:
        made(tmp_path, text, target, files)
    assert problem in str(caught.value)


def test_one_half_of_the_credentials_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="belong together") as caught:
        made(tmp_path, aws_secret_access_key=None)
    assert "AKIA" not in str(caught.value)


class Estimator:
    """Replaces the class of sagemaker: stores its arguments and the variables it saw."""

    failure: Exception | None = None
    calls: list[tuple[dict[str, Any], dict[str, str], Any]] = []
    latest_training_job = SimpleNamespace(name="job-1")
    model_data = "s3://model"

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def fit(self, inputs: Any) -> None:
        seen = {name: text for name, text in current().items() if name.startswith("AWS_")}
        self.calls.append((self.arguments, seen, inputs))
        if self.failure:
            raise self.failure


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> type[Estimator]:
    """The vendor's package, as far as a launch sees it."""
    exceptions: Any = ModuleType("botocore.exceptions")
    exceptions.BotoCoreError = type("BotoCoreError", (Exception,), {})
    exceptions.ClientError = type("ClientError", (Exception,), {})
    estimators: Any = ModuleType("sagemaker.huggingface")
    estimators.HuggingFace = Estimator
    for module in (ModuleType("botocore"), exceptions, ModuleType("sagemaker"), estimators):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Estimator, "calls", [])
    return Estimator


def test_the_job_is_submitted_with_the_credentials_in_place(
    tmp_path: Path, vendor: type[Estimator], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, _ = made(tmp_path)
    assert launcher_for(plan).run(plan) == 0
    ((arguments, seen, inputs),) = vendor.calls
    assert arguments == ARGUMENTS
    assert inputs == {"train": "s3://a", "test": "s3://b"}
    assert seen.items() >= plan.detail(SageMakerDetails).credentials.items()
    assert "AWS_SECRET_ACCESS_KEY" not in current()
    assert capsys.readouterr().out == "The SageMaker job job-1 has ended. Its model: s3://model\n"


def test_a_refused_job_is_one_clear_error_without_credentials(
    tmp_path: Path, vendor: type[Estimator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "failure", ValueError("HUSH of AKIA-OPEN\n is wrong"))
    plan, _ = made(tmp_path)
    with pytest.raises(LaunchError) as caught:
        launcher_for(plan).run(plan)
    assert str(caught.value) == "The SageMaker job did not succeed: (hidden) of (hidden) is wrong"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    plan, _ = made(tmp_path)
    with pytest.raises(MissingPackageError, match="pip install 'sagemaker<3'"):
        launcher_for(plan).run(plan)


def job_files(tmp_path: Path) -> tuple[Any, argparse.Namespace]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("_file: ", f"_file: {tmp_path}/"))
    words = ["--aws_access_key_id", "AKIA-OPEN", "--aws_secret_access_key", "HUSH"]
    args = launch_command_parser().parse_args([*words, "src/train.py", "--lr", "0.1", "--fast"])
    return load_config_from_file(str(path)), args


def test_the_entry_point_with_a_namespace_gives_the_same_job(tmp_path: Path) -> None:
    config, args = job_files(tmp_path)
    with clear_environment():
        arguments, inputs = namespace.prepare_sagemager_args_inputs(config, args)
        assert current()["AWS_SECRET_ACCESS_KEY"] == "HUSH"
    assert arguments == ARGUMENTS
    assert inputs == {"train": "s3://a", "test": "s3://b"}


def test_the_launcher_with_a_namespace_submits_it(tmp_path: Path, vendor: type[Estimator]) -> None:
    config, args = job_files(tmp_path)
    namespace.sagemaker_launcher(config, args)
    assert vendor.calls[0][0] == ARGUMENTS
