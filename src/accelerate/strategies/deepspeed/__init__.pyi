from accelerate.strategies.deepspeed.building import (
    Given as Given,
    batch_sizes_of as batch_sizes_of,
    filling_of as filling_of,
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
    problems_of as problems_of,
)
from accelerate.strategies.deepspeed.engine import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
    EnginePart as EnginePart,
    copy_tied as copy_tied,
    gathered_parameters as gathered_parameters,
)
from accelerate.strategies.deepspeed.strategy import DeepSpeed as DeepSpeed, leaves_of as leaves_of
