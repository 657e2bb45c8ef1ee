from accelerate.strategies.deepspeed.building import (
    EngineInputs as EngineInputs,
    auto_values_of as auto_values_of,
    batch_sizes_of as batch_sizes_of,
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from accelerate.strategies.deepspeed.checks import problems_of as problems_of
from accelerate.strategies.deepspeed.engine import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
    EnginePart as EnginePart,
    copy_to_cpu as copy_to_cpu,
    gathered_parameters as gathered_parameters,
)
from accelerate.strategies.deepspeed.strategy import DeepSpeed as DeepSpeed, leaves_of as leaves_of
