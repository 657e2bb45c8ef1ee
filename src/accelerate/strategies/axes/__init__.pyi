from accelerate.strategies.axes.context import ContextAxis as ContextAxis
from accelerate.strategies.axes.sequence import (
    Axis as Axis,
    SequenceAxis as SequenceAxis,
    check_attention as check_attention,
    loader_class as loader_class,
    resolve_sequence_axis as resolve_sequence_axis,
)
from accelerate.strategies.axes.tensor import plan_of as plan_of, share_layers as share_layers
