"""Old import path of the launch half."""

from accelerate.base import (
    DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    PrecisionType as PrecisionType,
    SageMakerDistributedType as SageMakerDistributedType,
    compare_versions as compare_versions,
    merge_dicts as merge_dicts,
    str_to_bool as str_to_bool,
)
from accelerate.devices import (
    is_fp8_available as is_fp8_available,
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_sdaa_available as is_sdaa_available,
    is_torch_xla_available as is_torch_xla_available,
    is_xpu_available as is_xpu_available,
)
from accelerate.launch import (
    PrepareForLaunch as PrepareForLaunch,
    env_var_path_add as env_var_path_add,
    get_free_port as get_free_port,
    is_port_in_use as is_port_in_use,
    prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env,
    prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config,
    prepare_multi_gpu_env as prepare_multi_gpu_env,
    prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env,
    prepare_tpu as prepare_tpu,
    setup_fp8_env as setup_fp8_env,
)
from accelerate.launch.namespace import (
    _convert_nargs_to_dict as _convert_nargs_to_dict,
    _filter_args as _filter_args,
)
from accelerate.settings import SageMakerConfig as SageMakerConfig
