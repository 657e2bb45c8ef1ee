"""Old import path of what trains with DeepSpeed."""

from accelerate.base import (
    DistributedType as DistributedType,
    compare_versions as compare_versions,
    is_bnb_available as is_bnb_available,
)
from accelerate.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accelerate.plugins import (
    HfDeepSpeedConfig as HfDeepSpeedConfig,
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
)
from accelerate.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate.strategies.deepspeed import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
