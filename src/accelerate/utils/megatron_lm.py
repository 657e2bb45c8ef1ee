"""Old import path of what trains with Megatron-LM."""

from accelerate.base import is_megatron_lm_available as is_megatron_lm_available
from accelerate.nested import recursively_apply as recursively_apply, send_to_device as send_to_device
from accelerate.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate.strategies.megatron import (
    MegatronEngine as MegatronEngine,
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    finish_mpu_init as finish_mpu_init,
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    model_provider_func as model_provider_func,
    prepare_data_loader as prepare_data_loader,
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
    prepare_optimizer as prepare_optimizer,
    prepare_scheduler as prepare_scheduler,
)
from accelerate.strategies.megatron.initialize import initialize as initialize
from accelerate.strategies.megatron.steps import (
    AbstractTrainStep as AbstractTrainStep,
    BertTrainStep as BertTrainStep,
    GPTTrainStep as GPTTrainStep,
    T5TrainStep as T5TrainStep,
)
