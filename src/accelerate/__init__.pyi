from accelerate import (
    accelerator as accelerator,
    big_modeling as big_modeling,
    commands as commands,
    data_loader as data_loader,
    hooks as hooks,
    inference as inference,
    launchers as launchers,
    local_sgd as local_sgd,
    logging as logging,
    optimizer as optimizer,
    parallelism_config as parallelism_config,
    scheduler as scheduler,
    state as state,
    tracking as tracking,
    utils as utils,
)
from accelerate.accelerator import Accelerator as Accelerator
from accelerate.base import (
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    is_rich_available as is_rich_available,
)
from accelerate.big_modeling import (
    cpu_offload as cpu_offload,
    cpu_offload_with_hook as cpu_offload_with_hook,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
    infer_auto_device_map as infer_auto_device_map,
    init_empty_weights as init_empty_weights,
    init_on_device as init_on_device,
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from accelerate.data_loader import skip_first_batches as skip_first_batches
from accelerate.diagnostics import find_executable_batch_size as find_executable_batch_size
from accelerate.inference import prepare_pippy as prepare_pippy
from accelerate.launchers import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
from accelerate.local_sgd import DiLoCo as DiLoCo
from accelerate.parallelism_config import ParallelismConfig as ParallelismConfig
from accelerate.plugins import (
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DeepSpeedPlugin as DeepSpeedPlugin,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    ProfileKwargs as ProfileKwargs,
)
from accelerate.rng import synchronize_rng_states as synchronize_rng_states
from accelerate.state import PartialState as PartialState

__version__: str
