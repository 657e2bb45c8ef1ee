"""Amazon SageMaker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.base.constants import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
)
from accelerate.settings.option import Section, option


@dataclass(frozen=True, kw_only=True)
class SageMakerSection(Section):
    """A training job on Amazon SageMaker."""

    title = "AWS Arguments"

    aws_access_key_id: str | None = option(None, "Access key for AWS.", key=None, secret=True)
    aws_secret_access_key: str | None = option(None, "Secret key for AWS.", key=None, secret=True)
    ec2_instance_type: str | None = option(None, "Instance type.", flags=())
    iam_role_name: str | None = option(None, "Role that the job runs as.", flags=())
    image_uri: str | None = option(None, "Container image of your own.", flags=())
    profile: str | None = option(None, "Profile of the AWS configuration.", flags=())
    region: str = option("us-east-1", "AWS region.", flags=())
    base_job_name: str = option("accelerate-sagemaker-1", "Beginning of the job's name.", flags=())
    pytorch_version: str = option(SAGEMAKER_PYTORCH_VERSION, "PyTorch version of the image.", flags=())
    transformers_version: str = option(
        SAGEMAKER_TRANSFORMERS_VERSION, "Transformers version of the image.", flags=()
    )
    py_version: str = option(SAGEMAKER_PYTHON_VERSION, "Python version of the image.", flags=())
    sagemaker_inputs_file: str | None = option(None, "Table of input channels.", flags=())
    sagemaker_metrics_file: str | None = option(None, "Table of metric definitions.", flags=())

    @staticmethod
    def active(values: Mapping[str, Any]) -> bool:
        """Only for a job on Amazon SageMaker."""
        return bool(values["compute_environment"] == "AMAZON_SAGEMAKER")
