"""One PyTorch training loop on one CPU, many GPUs or many machines.

The names below are loaded on first use: `import accelerate` alone costs next to nothing and imports no torch.
"""

from typing import TYPE_CHECKING, Any

from accelerate.base.lazy import attach

if TYPE_CHECKING:
    from accelerate import (
        accelerator as accelerator,
    )
    from accelerate import (
        big_modeling as big_modeling,
    )
    from accelerate import (
        commands as commands,
    )
    from accelerate import (
        data_loader as data_loader,
    )
    from accelerate import (
        hooks as hooks,
    )
    from accelerate import (
        inference as inference,
    )
    from accelerate import (
        launchers as launchers,
    )
    from accelerate import (
        local_sgd as local_sgd,
    )
    from accelerate import (
        logging as logging,
    )
    from accelerate import (
        optimizer as optimizer,
    )
    from accelerate import (
        parallelism_config as parallelism_config,
    )
    from accelerate import (
        scheduler as scheduler,
    )
    from accelerate import (
        state as state,
    )
    from accelerate import (
        tracking as tracking,
    )
    from accelerate import (
        utils as utils,
    )
    from accelerate.accelerator import Accelerator as Accelerator
    from accelerate.base.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from accelerate.base.enums import DistributedType as DistributedType
    from accelerate.base.packages import is_rich_available as is_rich_available
    from accelerate.big_modeling import cpu_offload as cpu_offload
    from accelerate.big_modeling import cpu_offload_with_hook as cpu_offload_with_hook
    from accelerate.big_modeling import disk_offload as disk_offload
    from accelerate.big_modeling import dispatch_model as dispatch_model
    from accelerate.big_modeling import infer_auto_device_map as infer_auto_device_map
    from accelerate.big_modeling import init_empty_weights as init_empty_weights
    from accelerate.big_modeling import init_on_device as init_on_device
    from accelerate.big_modeling import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from accelerate.big_modeling import load_checkpoint_in_model as load_checkpoint_in_model
    from accelerate.data_loader import skip_first_batches as skip_first_batches
    from accelerate.diagnostics.batch_size import find_executable_batch_size as find_executable_batch_size
    from accelerate.inference import prepare_pippy as prepare_pippy
    from accelerate.launchers import debug_launcher as debug_launcher
    from accelerate.launchers import notebook_launcher as notebook_launcher
    from accelerate.parallelism_config import ParallelismConfig as ParallelismConfig
    from accelerate.plugins.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
    from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accelerate.plugins.handlers import AutocastKwargs as AutocastKwargs
    from accelerate.plugins.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accelerate.plugins.handlers import GradScalerKwargs as GradScalerKwargs
    from accelerate.plugins.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accelerate.plugins.profile import ProfileKwargs as ProfileKwargs
    from accelerate.plugins.training import DataLoaderConfiguration as DataLoaderConfiguration
    from accelerate.rng import synchronize_rng_states as synchronize_rng_states
    from accelerate.state import PartialState as PartialState

    __version__: str

# Public name -> the module that holds it; a module is its own home.
_HOMES = {
    "Accelerator": "accelerate.accelerator",
    "AutocastKwargs": "accelerate.plugins.handlers",
    "DDPCommunicationHookType": "accelerate.base.enums",
    "DataLoaderConfiguration": "accelerate.plugins.training",
    "DeepSpeedPlugin": "accelerate.plugins.deepspeed",
    "DistributedDataParallelKwargs": "accelerate.plugins.handlers",
    "DistributedType": "accelerate.base.enums",
    "FullyShardedDataParallelPlugin": "accelerate.plugins.fsdp",
    "GradScalerKwargs": "accelerate.plugins.handlers",
    "InitProcessGroupKwargs": "accelerate.plugins.handlers",
    "ParallelismConfig": "accelerate.parallelism_config",
    "PartialState": "accelerate.state",
    "ProfileKwargs": "accelerate.plugins.profile",
    "cpu_offload": "accelerate.big_modeling",
    "cpu_offload_with_hook": "accelerate.big_modeling",
    "debug_launcher": "accelerate.launchers",
    "disk_offload": "accelerate.big_modeling",
    "dispatch_model": "accelerate.big_modeling",
    "find_executable_batch_size": "accelerate.diagnostics.batch_size",
    "infer_auto_device_map": "accelerate.big_modeling",
    "init_empty_weights": "accelerate.big_modeling",
    "init_on_device": "accelerate.big_modeling",
    "is_rich_available": "accelerate.base.packages",
    "load_checkpoint_and_dispatch": "accelerate.big_modeling",
    "load_checkpoint_in_model": "accelerate.big_modeling",
    "notebook_launcher": "accelerate.launchers",
    "prepare_pippy": "accelerate.inference",
    "skip_first_batches": "accelerate.data_loader",
    "synchronize_rng_states": "accelerate.rng",
    "accelerator": "accelerate.accelerator",
    "big_modeling": "accelerate.big_modeling",
    "commands": "accelerate.commands",
    "data_loader": "accelerate.data_loader",
    "hooks": "accelerate.hooks",
    "inference": "accelerate.inference",
    "launchers": "accelerate.launchers",
    "local_sgd": "accelerate.local_sgd",
    "logging": "accelerate.logging",
    "optimizer": "accelerate.optimizer",
    "parallelism_config": "accelerate.parallelism_config",
    "scheduler": "accelerate.scheduler",
    "state": "accelerate.state",
    "tracking": "accelerate.tracking",
    "utils": "accelerate.utils",
}

_load, __dir__, __all__ = attach(__name__, _HOMES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version  # slow, and few programs ask

            return version("accelerate")
        return _load(name)
