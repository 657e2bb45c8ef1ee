"""Amazon SageMaker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.base import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
)
from accelerate.settings.option import Section, option


@dataclass(frozen=True, kw_only=True)
class SageMakerSection(Section):
    """A training job on Amazon SageMaker."""

    title = "AWS Arguments"
    makes_flags = False

    aws_access_key_id: str | None = option(
        None, "Access key for AWS.", flags=("--aws_access_key_id",), key=None, secret=True
    )
    aws_secret_access_key: str | None = option(
        None, "Secret key for AWS.", flags=("--aws_secret_access_key",), key=None, secret=True
    )
    ec2_instance_type: str | None = option(None, "Instance type.", ask="Which instance type?")
    iam_role_name: str | None = option(
        None, "Role that the job runs as.", ask="Which IAM role does the job run as?"
    )
    image_uri: str | None = option(
        None, "Container image of your own.", ask="Container image of your own (empty for none)?"
    )
    profile: str | None = option(
        None,
        "Profile of the AWS configuration.",
        ask="Which profile of the AWS configuration (empty for the default one)?",
    )
    region: str = option("us-east-1", "AWS region.", ask="Which AWS region?")
    base_job_name: str = option(
        "accelerate-sagemaker-1", "Beginning of the job's name.", ask="How does the job's name begin?"
    )
    pytorch_version: str = option(
        SAGEMAKER_PYTORCH_VERSION,
        "PyTorch version of the image.",
        ask="Which PyTorch version of the image?",
        advanced=True,
    )
    transformers_version: str = option(
        SAGEMAKER_TRANSFORMERS_VERSION,
        "Transformers version of the image.",
        ask="Which Transformers version of the image?",
        advanced=True,
    )
    py_version: str = option(
        SAGEMAKER_PYTHON_VERSION,
        "Python version of the image.",
        ask="Which Python version of the image?",
        advanced=True,
    )
    sagemaker_inputs_file: str | None = option(
        None, "Table of input channels.", ask="Table of input channels (empty for none)?"
    )
    sagemaker_metrics_file: str | None = option(
        None, "Table of metric definitions.", ask="Table of metric definitions (empty for none)?"
    )
    additional_args: dict[str, Any] | None = option(
        None, "Further arguments for the estimator of SageMaker, as they are."
    )

    @classmethod
    def active(cls, values: Mapping[str, Any]) -> bool:
        """Only for a job on Amazon SageMaker."""
        return bool(values["compute_environment"] == "AMAZON_SAGEMAKER")
