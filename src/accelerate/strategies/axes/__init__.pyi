from accelerate.strategies.axes.context import (
    ContextParallel as ContextParallel,
    drop_masks as drop_masks,
    not_prepared as not_prepared,
    whole_sequences as whole_sequences,
)
from accelerate.strategies.axes.layers import split_layers as split_layers
from accelerate.strategies.axes.plans import plan_of as plan_of
from accelerate.strategies.axes.tensor import (
    CopiedTensorParallel as CopiedTensorParallel,
    TensorParallel as TensorParallel,
)
