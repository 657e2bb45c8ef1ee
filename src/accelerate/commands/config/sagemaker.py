"""The questionnaire for a job on Amazon SageMaker, and the IAM role that it runs as."""

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
from accelerate.commands.config.cluster import USUAL, Suggestions
from accelerate.commands.config.config_utils import DYNAMO_BACKENDS as DYNAMO_BACKENDS
from accelerate.settings import Prompt, Questionnaire, SageMakerConfig, as_mapping, prompt_of_this_process
from accelerate.settings.sections import DynamoSection, LaunchSection, PrecisionSection, SageMakerSection

SECTIONS = (LaunchSection, SageMakerSection, PrecisionSection, DynamoSection)
ASKED_OF_LAUNCH = ("distributed_type", "num_machines", "debug")
CREATE_ROLE = "Create this IAM role now, with your AWS credentials?"

TRUST_POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    ],
}
"""Lets SageMaker take the role."""

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
"""What a job may do: train, read its image, write logs and metrics, read and write its data."""


def get_sagemaker_input(
    prompt: Prompt | None = None, suggestions: Suggestions | None = None
) -> SageMakerConfig:
    """Ask for the settings of a job on Amazon SageMaker; arguments and errors are those of `get_user_input`.

    Credentials are not asked for and never written: the AWS profile has them.
    """
    kept = suggestions.kept if suggestions is not None else {}
    usual = {name: USUAL[name] for name in ("distributed_type", "ec2_instance_type", "iam_role_name")}
    chosen = prompt or prompt_of_this_process()
    asking = Questionnaire(
        chosen,
        SECTIONS,
        {**usual, "compute_environment": ComputeEnvironment.AMAZON_SAGEMAKER.value, **kept},
        {"distributed_type": tuple(kind.value for kind in SageMakerDistributedType)},
        left_out=[row.name for row in LaunchSection.options() if row.name not in ASKED_OF_LAUNCH],
    )
    answers = asking.run()
    mapping = as_mapping(answers)
    if is_boto3_available() and chosen.confirm(CREATE_ROLE, False):
        _create_iam_role_for_sagemaker(mapping["iam_role_name"])
        mapping["iam_role_name"] = _get_iam_role_arn(mapping["iam_role_name"])
    mapping["compute_environment"] = ComputeEnvironment.AMAZON_SAGEMAKER
    mapping.setdefault("use_cpu", False)
    mapping.setdefault("debug", False)
    return SageMakerConfig(**mapping)


def _create_iam_role_for_sagemaker(role_name: str) -> None:
    """Create the role unless it is there."""
    client = _iam()
    try:
        client.create_role(RoleName=role_name, AssumeRolePolicyDocument=json.dumps(TRUST_POLICY))
    except client.exceptions.EntityAlreadyExistsException:
        return
    client.put_role_policy(
        RoleName=role_name, PolicyName=f"{role_name}_policy_permission", PolicyDocument=json.dumps(POLICY)
    )


def _get_iam_role_arn(role_name: str) -> str:
    """The full name of a role."""
    return str(_iam().get_role(RoleName=role_name)["Role"]["Arn"])


def _iam() -> Any:
    require("boto3", "Creating an IAM role")
    import boto3

    return boto3.client("iam")
