from accelerate.strategies.axes.base import Axis as Axis
from accelerate.strategies.axes.context import ContextAxis as ContextAxis
from accelerate.strategies.axes.sequence import (
    SequenceAxis as SequenceAxis,
    check_attention as check_attention,
    loader_class as loader_class,
    resolve_sequence_axis as resolve_sequence_axis,
)
from accelerate.strategies.axes.tensor import TensorAxis as TensorAxis, plan_of as plan_of
