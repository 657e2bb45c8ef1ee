from accelerate.strategies.axes import whole_losses as whole_losses
from accelerate.strategies.axes.context import ContextAxis as ContextAxis, merge_shards as merge_shards
from accelerate.strategies.axes.exchanged_attention import (
    sequence_parallel_attention as sequence_parallel_attention,
)
from accelerate.strategies.axes.expert import (
    FSDP_DIMENSIONS as FSDP_DIMENSIONS,
    ExpertAxis as ExpertAxis,
    ExpertMeshes as ExpertMeshes,
    build_meshes as build_meshes,
    find_experts as find_experts,
    list_experts as list_experts,
    mesh_of_fsdp as mesh_of_fsdp,
    meshes_of as meshes_of,
    shard_experts as shard_experts,
    trace_share as trace_share,
    whole_experts as whole_experts,
)
from accelerate.strategies.axes.sequences import (
    SequenceAxis as SequenceAxis,
    merge_sequences as merge_sequences,
    outputs_are_whole as outputs_are_whole,
)
from accelerate.strategies.axes.sharded_forwards import (
    resumed_in_part as resumed_in_part,
    sequence_state as sequence_state,
)
from accelerate.strategies.axes.tensor import (
    TensorAxis as TensorAxis,
    check_divisible as check_divisible,
    plan_of as plan_of,
    shard_layers as shard_layers,
)
from accelerate.strategies.axes.ulysses import (
    UlyssesAxis as UlyssesAxis,
    check_attention as check_attention,
    loader_class as loader_class,
)
from accelerate.strategies.axes.whole_gradients import (
    WholeGradients as WholeGradients,
    compare_groups as compare_groups,
)
