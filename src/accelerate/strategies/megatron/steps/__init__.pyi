from accelerate.strategies.megatron.steps.base import (
    AbstractTrainStep as AbstractTrainStep,
    Output as Output,
    output_class as output_class,
    sum_over_tokens as sum_over_tokens,
)
from accelerate.strategies.megatron.steps.bert import BertTrainStep as BertTrainStep
from accelerate.strategies.megatron.steps.gpt import (
    GPTTrainStep as GPTTrainStep,
    T5TrainStep as T5TrainStep,
    begin_of_documents as begin_of_documents,
    hide_later as hide_later,
)
