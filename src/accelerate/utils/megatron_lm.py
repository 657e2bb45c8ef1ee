"""Old import path of what trains with Megatron-LM."""

from accelerate.base.packages import is_megatron_lm_available as is_megatron_lm_available
from accelerate.nested import recursively_apply as recursively_apply, send_to_device as send_to_device
from accelerate.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate.strategies.megatron.data import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    prepare_data_loader as prepare_data_loader,
)
from accelerate.strategies.megatron.engine import MegatronEngine as MegatronEngine
from accelerate.strategies.megatron.initialize import (
    finish_mpu_init as finish_mpu_init,
    initialize as initialize,
    model_provider_func as model_provider_func,
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
    prepare_optimizer as prepare_optimizer,
    prepare_scheduler as prepare_scheduler,
)
from accelerate.strategies.megatron.reductions import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from accelerate.strategies.megatron.steps.base import AbstractTrainStep as AbstractTrainStep
from accelerate.strategies.megatron.steps.bert import BertTrainStep as BertTrainStep
from accelerate.strategies.megatron.steps.gpt import GPTTrainStep as GPTTrainStep
from accelerate.strategies.megatron.steps.t5 import T5TrainStep as T5TrainStep
from accelerate.strategies.megatron.wrappers import (
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
)
