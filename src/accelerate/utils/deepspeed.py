"""Old import path of what trains with DeepSpeed."""

from accelerate.base.enums import DistributedType as DistributedType
from accelerate.base.packages import is_bnb_available as is_bnb_available
from accelerate.base.versions import compare_versions as compare_versions
from accelerate.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accelerate.plugins.deepspeed import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from accelerate.plugins.deepspeed_config import HfDeepSpeedConfig as HfDeepSpeedConfig
from accelerate.scheduler import AcceleratedScheduler as AcceleratedScheduler
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
