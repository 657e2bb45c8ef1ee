"""Questionnaire for a job on Amazon SageMaker, which can create the IAM role of the job.

`accelerate config` calls `get_sagemaker_input`.
"""

from __future__ import annotations

import json
from typing import Any

from accelerate.base import (
    SAGEMAKER_PARALLEL_EC2_INSTANCES as SAGEMAKER_PARALLEL_EC2_INSTANCES,
    TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES,
    ComputeEnvironment,
    SageMakerDistributedType,
    is_boto3_available as is_boto3_available,
    require,
)
from accelerate.commands.config.cluster import MACHINE_DEFAULTS, Suggestions
from accelerate.commands.config.config_utils import DYNAMO_BACKENDS as DYNAMO_BACKENDS
from accelerate.settings import (
    Prompt,
    Questionnaire,
    SageMakerConfig,
    as_mapping,
    make_config,
    prompt_of_this_process,
)
from accelerate.settings.sections import DynamoSection, LaunchSection, PrecisionSection, SageMakerSection

SECTIONS = (LaunchSection, SageMakerSection, PrecisionSection, DynamoSection)
ASKED_LAUNCH_OPTIONS = ("distributed_type", "num_machines", "debug")
CREATE_ROLE = "Create this IAM role now, with your AWS credentials?"

TRUST_POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    ],
}
"""Policy that lets SageMaker assume the role."""

POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Action": [
                "sagemaker:*",
                "ecr:GetAuthorizationToken",
                "ecr:GetDownloadUrlForLayer",
                "ecr:BatchGetImage",
                "ecr:BatchCheckLayerAvailability",
                "cloudwatch:PutMetricData",
                "logs:CreateLogGroup",
                "logs:CreateLogStream",
                "logs:DescribeLogStreams",
                "logs:GetLogEvents",
                "logs:PutLogEvents",
                "s3:CreateBucket",
                "s3:GetBucketLocation",
                "s3:GetObject",
                "s3:ListBucket",
                "s3:PutObject",
            ],
            "Resource": "*",
        }
    ],
}
"""Permissions of a job to train, read its image, write logs and metrics, and read and write its data."""


def get_sagemaker_input(
    prompt: Prompt | None = None, suggestions: Suggestions | None = None
) -> SageMakerConfig:
    """Asks for the settings of a job on Amazon SageMaker, with the arguments of `get_user_input`.

    Credentials are not asked for and never written, because the AWS profile has them. Errors are those of
    `get_user_input`, too.
    """
    kept = suggestions.kept if suggestions is not None else {}
    defaults = {
        name: MACHINE_DEFAULTS[name] for name in ("distributed_type", "ec2_instance_type", "iam_role_name")
    }
    prompt = prompt or prompt_of_this_process()
    questions = Questionnaire(
        prompt,
        SECTIONS,
        {**defaults, "compute_environment": ComputeEnvironment.AMAZON_SAGEMAKER.value, **kept},
        {"distributed_type": tuple(kind.value for kind in SageMakerDistributedType)},
        left_out=[row.name for row in LaunchSection.options() if row.name not in ASKED_LAUNCH_OPTIONS],
    )
    answers = questions.run()
    mapping = as_mapping(answers)
    if is_boto3_available() and prompt.confirm(CREATE_ROLE, False):
        _create_iam_role_for_sagemaker(mapping["iam_role_name"])
        mapping["iam_role_name"] = _get_iam_role_arn(mapping["iam_role_name"])
    mapping["compute_environment"] = ComputeEnvironment.AMAZON_SAGEMAKER
    mapping.setdefault("use_cpu", False)
    mapping.setdefault("debug", False)
    return make_config(SageMakerConfig, mapping)


def _create_iam_role_for_sagemaker(role_name: str) -> None:
    """Creates the role unless it exists."""
    client = _iam()
    try:
        client.create_role(RoleName=role_name, AssumeRolePolicyDocument=json.dumps(TRUST_POLICY))
    except client.exceptions.EntityAlreadyExistsException:
        return
    client.put_role_policy(
        RoleName=role_name, PolicyName=f"{role_name}_policy_permission", PolicyDocument=json.dumps(POLICY)
    )


def _get_iam_role_arn(role_name: str) -> str:
    """Returns the ARN of a role, under the name that client programs import."""
    return str(_iam().get_role(RoleName=role_name)["Role"]["Arn"])


def _iam() -> Any:
    require("boto3", "Creating an IAM role")
    import boto3

    return boto3.client("iam")
