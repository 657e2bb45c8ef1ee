from accelerate.strategies.megatron.data import (
    BatchShape as BatchShape,
    LossLog as LossLog,
    MegatronBatches as MegatronBatches,
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    RankGrid as RankGrid,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    broadcast_batch as broadcast_batch,
    broadcast_outputs as broadcast_outputs,
    combine_reports as combine_reports,
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    means as means,
    perplexity as perplexity,
    prepare_data_loader as prepare_data_loader,
    refuse_batch_sampler as refuse_batch_sampler,
    with_batch_size as with_batch_size,
)
from accelerate.strategies.megatron.engine import (
    MegatronEngine as MegatronEngine,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
)
from accelerate.strategies.megatron.library import (
    build_datasets as build_datasets,
    finish_mpu_init as finish_mpu_init,
    initialize as initialize,
    model_provider_func as model_provider_func,
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
    prepare_optimizer as prepare_optimizer,
    prepare_scheduler as prepare_scheduler,
)
from accelerate.strategies.megatron.steps import (
    AbstractTrainStep as AbstractTrainStep,
    BertTrainStep as BertTrainStep,
    GPTTrainStep as GPTTrainStep,
    StepOutput as StepOutput,
    T5TrainStep as T5TrainStep,
    causal_mask as causal_mask,
    document_starts as document_starts,
    output_class as output_class,
    sum_over_tokens as sum_over_tokens,
)
from accelerate.strategies.megatron.strategy import MegatronLM as MegatronLM, plan_run as plan_run
