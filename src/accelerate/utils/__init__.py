"""Old import paths of names that live elsewhere: imports, nothing else."""

# The modules too, as attributes of this package; but `tqdm` is the function.
from accelerate.utils import (
    bnb as bnb,
    constants as constants,
    dataclasses as dataclasses,
    environment as environment,
    imports as imports,
    launch as launch,
    memory as memory,
    modeling as modeling,
    offload as offload,
    operations as operations,
    other as other,
    random as random,
    torch_xla as torch_xla,
    versions as versions,
)

from accelerate.base.constants import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
    MODEL_NAME as MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME,
    RNG_STATE_NAME as RNG_STATE_NAME,
    SAFE_MODEL_NAME as SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
    SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME,
    SCHEDULER_NAME as SCHEDULER_NAME,
    TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES,
    TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME,
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate.base.enums import (
    ComputeEnvironment as ComputeEnvironment,
    CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
    SageMakerDistributedType as SageMakerDistributedType,
)
from accelerate.base.environ import (
    clear_environment as clear_environment,
    convert_dict_to_env_variables as convert_dict_to_env_variables,
    get_int_from_env as get_int_from_env,
    parse_choice_from_env as parse_choice_from_env,
    parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment,
    purge_accelerate_environment as purge_accelerate_environment,
    str_to_bool as str_to_bool,
)
from accelerate.base.packages import (
    are_libraries_initialized as are_libraries_initialized,
    is_4bit_bnb_available as is_4bit_bnb_available,
    is_8bit_bnb_available as is_8bit_bnb_available,
    is_aim_available as is_aim_available,
    is_amdsmi_available as is_amdsmi_available,
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    is_bnb_available as is_bnb_available,
    is_boto3_available as is_boto3_available,
    is_clearml_available as is_clearml_available,
    is_comet_ml_available as is_comet_ml_available,
    is_datasets_available as is_datasets_available,
    is_deepspeed_available as is_deepspeed_available,
    is_dvclive_available as is_dvclive_available,
    is_import_timer_available as is_import_timer_available,
    is_lomo_available as is_lomo_available,
    is_matplotlib_available as is_matplotlib_available,
    is_megatron_lm_available as is_megatron_lm_available,
    is_mlflow_available as is_mlflow_available,
    is_msamp_available as is_msamp_available,
    is_pandas_available as is_pandas_available,
    is_peft_available as is_peft_available,
    is_pippy_available as is_pippy_available,
    is_pynvml_available as is_pynvml_available,
    is_pytest_available as is_pytest_available,
    is_rich_available as is_rich_available,
    is_sagemaker_available as is_sagemaker_available,
    is_schedulefree_available as is_schedulefree_available,
    is_swanlab_available as is_swanlab_available,
    is_tensorboard_available as is_tensorboard_available,
    is_timm_available as is_timm_available,
    is_torchao_available as is_torchao_available,
    is_torchdata_available as is_torchdata_available,
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    is_torchvision_available as is_torchvision_available,
    is_trackio_available as is_trackio_available,
    is_transformers_available as is_transformers_available,
    is_wandb_available as is_wandb_available,
    is_weights_only_available as is_weights_only_available,
    torchao_required as torchao_required,
)
from accelerate.base.system import check_os_kernel as check_os_kernel
from accelerate.base.text import (
    convert_bytes as convert_bytes,
    convert_file_size_to_int as convert_file_size_to_int,
    get_pretty_name as get_pretty_name,
    merge_dicts as merge_dicts,
    recursive_getattr as recursive_getattr,
)
from accelerate.base.versions import (
    compare_versions as compare_versions,
    is_torch_version as is_torch_version,
)
from accelerate.big_modeling.budget import (
    get_balanced_memory as get_balanced_memory,
    get_max_memory as get_max_memory,
)
from accelerate.big_modeling.checking import check_device_map as check_device_map
from accelerate.big_modeling.device_map import (
    infer_auto_device_map as infer_auto_device_map,
)
from accelerate.big_modeling.load import load_checkpoint_in_model as load_checkpoint_in_model
from accelerate.commands.config.default import write_basic_config as write_basic_config
from accelerate.compilation import (
    compile_regions as compile_regions,
    compile_regions_deepspeed as compile_regions_deepspeed,
    compile_regions_fsdp2 as compile_regions_fsdp2,
    has_compiled_regions as has_compiled_regions,
    is_compiled_module as is_compiled_module,
)
from accelerate.devices.affinity import set_numa_affinity as set_numa_affinity
from accelerate.devices.availability import (
    is_bf16_available as is_bf16_available,
    is_cuda_available as is_cuda_available,
    is_fp16_available as is_fp16_available,
    is_fp8_available as is_fp8_available,
    is_habana_gaudi1 as is_habana_gaudi1,
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_rocm_available as is_rocm_available,
    is_sdaa_available as is_sdaa_available,
    is_torch_xla_available as is_torch_xla_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    is_triton_available as is_triton_available,
    is_xccl_available as is_xccl_available,
    is_xpu_available as is_xpu_available,
)
from accelerate.devices.hardware_table import get_current_device_type as get_current_device_type
from accelerate.devices.memory import release_memory as release_memory
from accelerate.devices.nvidia import (
    check_cuda_fp8_capability as check_cuda_fp8_capability,
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
    get_gpu_info as get_gpu_info,
)
from accelerate.devices.xla import install_xla as install_xla
from accelerate.diagnostics.batch_size import find_executable_batch_size as find_executable_batch_size
from accelerate.hooks.offloaded import (
    align_module_device as align_module_device,
    has_offloaded_params as has_offloaded_params,
)
from accelerate.launch.namespace import (
    prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env as prepare_multi_gpu_env,
    prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env,
    prepare_tpu as prepare_tpu,
)
from accelerate.launch.ports import is_port_in_use as is_port_in_use
from accelerate.launch.worker import PrepareForLaunch as PrepareForLaunch
from accelerate.nested import (
    TensorInformation as TensorInformation,
    concatenate as concatenate,
    find_batch_size as find_batch_size,
    find_device as find_device,
    get_data_structure as get_data_structure,
    honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size,
    initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple,
    is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor,
    listify as listify,
    recursively_apply as recursively_apply,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from accelerate.ops.casting import (
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
)
from accelerate.ops.collectives import (
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    copy_tensor_to_devices as copy_tensor_to_devices,
    gather as gather,
    gather_object as gather_object,
    reduce as reduce,
)
from accelerate.ops.padding import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    pad_across_processes as pad_across_processes,
    pad_input_tensors as pad_input_tensors,
)
from accelerate.parallelism_config import ParallelismConfig as ParallelismConfig
from accelerate.plugins.deepspeed import (
    DeepSpeedPlugin as DeepSpeedPlugin,
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
)
from accelerate.plugins.deepspeed_config import HfDeepSpeedConfig as HfDeepSpeedConfig
from accelerate.plugins.dynamo import TorchDynamoPlugin as TorchDynamoPlugin
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accelerate.plugins.fp8 import (
    AORecipeKwargs as AORecipeKwargs,
    FP8RecipeKwargs as FP8RecipeKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    TERecipeKwargs as TERecipeKwargs,
)
from accelerate.plugins.handlers import (
    AutocastKwargs as AutocastKwargs,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
)
from accelerate.plugins.megatron import MegatronLMPlugin as MegatronLMPlugin
from accelerate.plugins.megatron_models import (
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
)
from accelerate.plugins.parallel import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from accelerate.plugins.profile import ProfileKwargs as ProfileKwargs
from accelerate.plugins.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from accelerate.plugins.training import (
    DataLoaderConfiguration as DataLoaderConfiguration,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    ProjectConfiguration as ProjectConfiguration,
)
from accelerate.precision.amp import (
    get_fsdp2_grad_scaler as get_fsdp2_grad_scaler,
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accelerate.precision.torchao import (
    convert_model_to_fp8_ao as convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
    has_ao_layers as has_ao_layers,
)
from accelerate.precision.transformer_engine import (
    apply_fp8_autowrap as apply_fp8_autowrap,
    contextual_fp8_autocast as contextual_fp8_autocast,
    convert_model as convert_model,
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from accelerate.quantization.layers import has_4bit_bnb_layers as has_4bit_bnb_layers
from accelerate.quantization.load import load_and_quantize_model as load_and_quantize_model
from accelerate.rng import (
    set_seed as set_seed,
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
from accelerate.state.accelerator_state import deepspeed_required as deepspeed_required
from accelerate.state.environments import get_cpu_distributed_information as get_cpu_distributed_information
from accelerate.state.partial import wait_for_everyone as wait_for_everyone
from accelerate.strategies.deepspeed.dummies import (
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
)
from accelerate.strategies.deepspeed.optimizers import (
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from accelerate.strategies.deepspeed.wrappers import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
from accelerate.strategies.fsdp.checkpoint import (
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from accelerate.strategies.fsdp.loading import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    ensure_weights_retied as ensure_weights_retied,
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
)
from accelerate.strategies.fsdp.merge import (
    merge_fsdp_weights as merge_fsdp_weights,
)
from accelerate.strategies.fsdp.parameters import (
    fsdp2_canonicalize_names as fsdp2_canonicalize_names,
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accelerate.strategies.fsdp.sharding import (
    fsdp2_apply_ac as fsdp2_apply_ac,
    fsdp2_prepare_model as fsdp2_prepare_model,
)
from accelerate.strategies.megatron.data import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    prepare_data_loader as megatron_lm_prepare_data_loader,
)
from accelerate.strategies.megatron.engine import MegatronEngine as MegatronEngine
from accelerate.strategies.megatron.initialize import (
    initialize as megatron_lm_initialize,
    prepare_model_optimizer_scheduler as megatron_lm_prepare_model_optimizer_scheduler,
    prepare_optimizer as megatron_lm_prepare_optimizer,
    prepare_scheduler as megatron_lm_prepare_scheduler,
)
from accelerate.strategies.megatron.wrappers import (
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
)
from accelerate.unwrapping import (
    extract_model_from_parallel as extract_model_from_parallel,
    is_peft_model as is_peft_model,
)
from accelerate.utils.tqdm import tqdm as tqdm
from accelerate.weights.files import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    load as load,
    load_state_dict as load_state_dict,
    save as save,
)
from accelerate.weights.modules import named_module_tensors as named_module_tensors
from accelerate.weights.placement import (
    id_tensor_storage as id_tensor_storage,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from accelerate.weights.sizes import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    compute_module_sizes as compute_module_sizes,
    dtype_byte_size as dtype_byte_size,
    get_max_layer_size as get_max_layer_size,
)
from accelerate.weights.index import save_offload_index as save_offload_index
from accelerate.weights.store import (
    OffloadedWeightsLoader as OffloadedWeightsLoader,
    PrefixedDataset as PrefixedDataset,
    extract_submodules_state_dict as extract_submodules_state_dict,
    load_offloaded_weight as load_offloaded_weight,
    load_offloaded_weights as load_offloaded_weights,
    offload_state_dict as offload_state_dict,
    offload_weight as offload_weight,
)
from accelerate.weights.tied import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    find_tied_parameters as find_tied_parameters,
    retie_parameters as retie_parameters,
)
from accelerate.strategies.megatron.reductions import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accelerate.strategies.megatron.steps.base import AbstractTrainStep as AbstractTrainStep
from accelerate.strategies.megatron.steps.bert import BertTrainStep as BertTrainStep
from accelerate.strategies.megatron.steps.gpt import GPTTrainStep as GPTTrainStep
from accelerate.strategies.megatron.steps.t5 import T5TrainStep as T5TrainStep
from accelerate.weights.gathered import GatheredParameters as GatheredParameters
from accelerate.weights.modules import get_model_tp_size as get_model_tp_size
from accelerate.weights.modules import get_module_children_bottom_up as get_module_children_bottom_up
from accelerate.weights.modules import model_has_dtensor as model_has_dtensor
from accelerate.weights.tied import check_tied_parameters_in_config as check_tied_parameters_in_config
