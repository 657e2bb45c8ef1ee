from accelerate.base import (
    SAGEMAKER_PYTHON_VERSION as SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION as SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION as SAGEMAKER_TRANSFORMERS_VERSION,
    ComputeEnvironment as ComputeEnvironment,
    DistributedType as DistributedType,
    SageMakerDistributedType as SageMakerDistributedType,
)
from accelerate.settings import (
    BaseConfig as BaseConfig,
    ClusterConfig as ClusterConfig,
    SageMakerConfig as SageMakerConfig,
    cache_dir as cache_dir,
    default_config_file as default_config_file,
    default_json_config_file as default_json_config_file,
    default_yaml_config_file as default_yaml_config_file,
    hf_cache_home as hf_cache_home,
    load_config_from_file as load_config_from_file,
)
