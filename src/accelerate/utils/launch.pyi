from accelerate.base import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate.commands.namespace import (
    _convert_nargs_to_dict as _convert_nargs_to_dict,
    _filter_args as _filter_args,
    prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config,
    setup_fp8_env as setup_fp8_env,
)
from accelerate.launch import env_var_path_add as env_var_path_add, get_free_port as get_free_port
from accelerate.settings import SageMakerConfig as SageMakerConfig
from accelerate.utils import *
