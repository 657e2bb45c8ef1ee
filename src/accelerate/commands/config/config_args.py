"""Import path of the configuration classes; they live in `accelerate.settings.config_file`."""

from accelerate.base.constants import SAGEMAKER_PYTHON_VERSION as SAGEMAKER_PYTHON_VERSION
from accelerate.base.constants import SAGEMAKER_PYTORCH_VERSION as SAGEMAKER_PYTORCH_VERSION
from accelerate.base.constants import SAGEMAKER_TRANSFORMERS_VERSION as SAGEMAKER_TRANSFORMERS_VERSION
from accelerate.base.enums import ComputeEnvironment as ComputeEnvironment
from accelerate.base.enums import DistributedType as DistributedType
from accelerate.base.enums import SageMakerDistributedType as SageMakerDistributedType
from accelerate.settings.config_file import BaseConfig as BaseConfig
from accelerate.settings.config_file import ClusterConfig as ClusterConfig
from accelerate.settings.config_file import SageMakerConfig as SageMakerConfig
from accelerate.settings.config_file import cache_dir as cache_dir
from accelerate.settings.config_file import default_config_file as default_config_file
from accelerate.settings.config_file import default_json_config_file as default_json_config_file
from accelerate.settings.config_file import default_yaml_config_file as default_yaml_config_file
from accelerate.settings.config_file import hf_cache_home as hf_cache_home
from accelerate.settings.config_file import load_config_from_file as load_config_from_file
