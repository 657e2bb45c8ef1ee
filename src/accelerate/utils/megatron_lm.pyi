from accelerate.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate.strategies.megatron import (
    finish_mpu_init as finish_mpu_init,
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    initialize as initialize,
    model_provider_func as model_provider_func,
    prepare_data_loader as prepare_data_loader,
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
    prepare_optimizer as prepare_optimizer,
    prepare_scheduler as prepare_scheduler,
)
from accelerate.utils import *
