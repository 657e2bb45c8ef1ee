"""The real package sagemaker, with AWS simulated in the same process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import SECONDS

pytestmark = pytest.mark.slow
JOB = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: NO
mixed_precision: bf16
ec2_instance_type: ml.p3.2xlarge
iam_role_name: runner
transformers_version: '4.36'
pytorch_version: '2.1'
py_version: py310
num_machines: 2
sagemaker_inputs_file: inputs.tsv
additional_args: {max_run: 3600}
"""
PROGRAM = """
import json, os, sys
from moto import mock_aws
mock_aws().start()
import boto3
policy = {"RoleName": "runner", "AssumeRolePolicyDocument": "{}"}
boto3.client("iam", region_name="us-east-1").create_role(**policy)
from accelerate.commands.launch import launch_command, launch_command_parser
launch_command(launch_command_parser().parse_args(sys.argv[1:]))
client = boto3.client("sagemaker", region_name="us-east-1")
(job,) = client.list_training_jobs()["TrainingJobSummaries"]
described = client.describe_training_job(TrainingJobName=job["TrainingJobName"])
print(json.dumps(described, default=str))
"""


def test_a_job_is_submitted_and_completes(tmp_path: Path) -> None:
    missing = [name for name in ("sagemaker", "moto", "boto3") if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'sagemaker<3' 'moto[server]'")
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "inputs.tsv").write_text("channel_name\tdata_location\ntrain\ts3://bucket/x\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print(1)\n")
    keys = ["--aws_access_key_id", "AKIA-OPEN", "--aws_secret_access_key", "HUSH"]
    words = ["--config_file", "job.yaml", *keys, "src/train.py", "--lr", "0.25"]
    kept = {name: text for name, text in os.environ.items() if name != "AWS_PROFILE"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=tmp_path,
        env={**kept, "AWS_EC2_METADATA_DISABLED": "true"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    described = json.loads(ended.stdout.splitlines()[-1])
    assert described["TrainingJobStatus"] == "Completed"
    assert described["TrainingJobName"].startswith("accelerate-sagemaker-1-")
    assert described["HyperParameters"]["lr"] == "0.25"
    assert described["HyperParameters"]["sagemaker_program"] == '"train.py"'
    assert (described["ResourceConfig"]["InstanceType"], described["ResourceConfig"]["InstanceCount"]) == (
        "ml.p3.2xlarge",
        2,
    )
    assert described["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600}
    assert described["InputDataConfig"][0]["ChannelName"] == "train"
    assert f"The SageMaker job {described['TrainingJobName']} has ended." in ended.stdout
    assert "HUSH" not in ended.stdout + ended.stderr
    assert "AKIA" not in ended.stdout + ended.stderr
