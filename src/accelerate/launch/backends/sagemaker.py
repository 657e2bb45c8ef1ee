"""Launcher that runs a training job on Amazon SageMaker with the package `sagemaker`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.base import (
    ConfigurationError,
    LaunchError,
    MissingPackageError,
    patch_environment,
    wrong_value,
)
from accelerate.launch.backends.base import Launcher
from accelerate.launch.machine import Machine
from accelerate.launch.plan import LaunchPlan, Target
from accelerate.settings import Settings, env
from accelerate.settings.sections import DynamoSection, LaunchSection, PrecisionSection, SageMakerSection

ESTIMATOR = "sagemaker.huggingface.HuggingFace"
DATA_PARALLEL = {"smdistributed": {"dataparallel": {"enabled": True}}}
INPUT_COLUMNS = ("channel_name", "data_location")
METRIC_COLUMNS = ("metric_name", "metric_regex")


@dataclass(frozen=True)
class SageMakerDetails:
    """Arguments of the estimator, data location of each channel, and hidden variables of AWS."""

    arguments: Mapping[str, Any]
    inputs: Mapping[str, str] | None
    credentials: Mapping[str, str] = field(repr=False)


class SageMakerLauncher(Launcher):
    """Launcher that submits the target as a training job and waits for it."""

    counts_remotely = True

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> SageMakerDetails:
        job = settings[SageMakerSection]
        inputs = _read_table(job.sagemaker_inputs_file, machine, INPUT_COLUMNS)
        credentials = {
            "AWS_PROFILE": job.profile,
            "AWS_ACCESS_KEY_ID": job.aws_access_key_id,
            "AWS_SECRET_ACCESS_KEY": job.aws_secret_access_key,
            "AWS_DEFAULT_REGION": job.region,
        }
        return SageMakerDetails(
            arguments=estimator_arguments(settings, plan.target, machine),
            inputs=None if inputs is None else dict(inputs),
            credentials={name: text for name, text in credentials.items() if text},
        )

    def command(self, plan: LaunchPlan) -> list[str]:
        """Returns the call of the estimator with its arguments."""
        job = plan.detail(SageMakerDetails)
        present = {name: value for name, value in job.arguments.items() if value is not None}
        words = [f"{name}={json.dumps(value)}" for name, value in present.items()]
        return [ESTIMATOR, *words, *([f"fit:inputs={json.dumps(job.inputs)}"] if job.inputs else [])]

    def run(self, plan: LaunchPlan) -> int:
        """Submits the job and waits for its end.

        Raises a `LaunchError` if AWS refuses the job or it fails.
        """
        job = plan.detail(SageMakerDetails)
        with patch_environment(**job.credentials):
            submit(job)
        return 0


def submit(job: SageMakerDetails) -> None:
    try:
        from sagemaker.huggingface import HuggingFace
    except ImportError as error:
        raise MissingPackageError(
            "A job on Amazon SageMaker needs sagemaker<3 (later versions have no such estimator), which "
            "cannot be imported here. Run `pip install 'sagemaker<3'`."
        ) from error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        estimator = HuggingFace(**job.arguments)
        estimator.fit(inputs=job.inputs)
    except (BotoCoreError, ClientError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            if job.credentials.get(name):
                reason = reason.replace(job.credentials[name], "(hidden)")
        raise LaunchError(f"The SageMaker job did not succeed: {reason}") from None
    name = estimator.latest_training_job.name
    print(f"The SageMaker job {name} has ended. Its model: {estimator.model_data}", flush=True)


def estimator_arguments(settings: Settings, target: Target, machine: Machine) -> dict[str, Any]:
    """Returns the arguments of the estimator, where ``additional_args`` of the file take precedence."""
    job = settings[SageMakerSection]
    _check(job, target)
    launch = settings[LaunchSection]
    kind = str(launch.distributed_type or "NO").upper()
    kind = "NO" if kind == "FALSE" else kind  # YAML parses an unquoted NO as false
    if kind == "MODEL_PARALLEL":
        fix = "Use NO or DATA_PARALLEL"
        raise wrong_value("distributed_type", kind, "model parallelism of SageMaker is not supported", fix)
    variables = {
        "ACCELERATE_USE_SAGEMAKER": "true",
        **env.encode(settings, (PrecisionSection, DynamoSection)),
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": kind,
    }
    metrics = _read_table(job.sagemaker_metrics_file, machine, METRIC_COLUMNS)
    has_image = job.image_uri is not None
    return {
        "image_uri": job.image_uri,
        "entry_point": Path(target.name).name,
        "source_dir": str(Path(target.name).parent),
        "role": job.iam_role_name,
        "transformers_version": None if has_image else job.transformers_version,
        "pytorch_version": None if has_image else job.pytorch_version,
        "py_version": None if has_image else job.py_version,
        "base_job_name": job.base_job_name,
        "instance_count": launch.num_machines,
        "instance_type": job.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": DATA_PARALLEL if kind == "DATA_PARALLEL" else None,
        "hyperparameters": _convert_nargs_to_dict(list(target.arguments)),
        "environment": variables,
        "metric_definitions": metrics and [{"Name": name, "Regex": pattern} for name, pattern in metrics],
        **(job.additional_args or {}),
    }


def _check(job: SageMakerSection, target: Target) -> None:
    if target.kind != "script" or not target.name.endswith(".py"):
        fix = "Pass a script, without --module and --no_python"
        raise wrong_value("training_script", target.name, "SageMaker runs a Python file", fix)
    for name in ("ec2_instance_type", "iam_role_name"):
        if not getattr(job, name):
            raise wrong_value(name, None, "a job needs it", "Write it into the configuration file")
    if bool(job.aws_access_key_id) != bool(job.aws_secret_access_key):
        raise ConfigurationError(
            "--aws_access_key_id and --aws_secret_access_key belong together. Give both, or a profile."
        )


def _read_table(path: str | None, machine: Machine, columns: tuple[str, str]) -> list[tuple[str, str]] | None:
    """Returns the rows of a file with two columns separated by tabs, or None without a file."""
    if path is None:
        return None
    text = machine.read_file(path)
    lines = [line for line in text.splitlines() if line.strip()]
    cells = [tuple(cell.strip() for cell in line.split("\t")) for line in lines]
    if not cells or cells[0] != columns:
        fix = f"Write the first line as {columns[0]}, a tab, {columns[1]}"
        raise wrong_value(path, lines[0] if lines else "", "the first line names the columns", fix)
    for line, row in zip(lines, cells, strict=True):
        if len(row) != len(columns):
            raise wrong_value(path, line, "a row has two cells with a tab between", "Correct the row")
    return [(row[0], row[1]) for row in cells[1:]]


def _convert_nargs_to_dict(nargs: list[str]) -> dict[str, Any]:
    """Converts the arguments of a script to names and values, where a flag without a value is `True`.

    Args:
        nargs: arguments such as ``--epochs 3 --fast``.

    Raises:
        ConfigurationError: a value has no name before it, or a name has several values.
    """
    result: dict[str, Any] = {}
    name, has_value = "", False
    for word in nargs:
        if word.startswith("-") and not NEGATIVE_NUMBER.match(word):
            name, equals, text = word.lstrip("-").partition("=")
            if name in result:
                raise _wrong_argument(word, f"SageMaker passes each option once, and {name!r} is repeated")
            has_value = bool(equals)
            result[name] = _value_of(text) if has_value else True
        elif has_value:
            raise _wrong_argument(word, f"SageMaker passes one value of an option, and {name!r} has several")
        else:
            result[name], has_value = _value_of(word), True
        if not name:
            raise _wrong_argument(word, "it belongs to no option")
    return result


def _wrong_argument(word: str, reason: str) -> ConfigurationError:
    fix = "Write arguments as --name value, and several values as one text that the script splits"
    return wrong_value("argument", word, reason, fix)


NEGATIVE_NUMBER = re.compile(r"-\.?\d")
TEXT = re.compile(r"[+A-Za-z]|-?0\d|.*_|.*\.\d+0$")
"""Words that Python would convert to numbers with another text, such as 007, 1_000, 1.10 and nan."""


def _value_of(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in () if TEXT.match(word) else (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
