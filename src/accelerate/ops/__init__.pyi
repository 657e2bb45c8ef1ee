from accelerate.ops.base import (
    Transport as Transport,
    at_least_1d as at_least_1d,
    finish_reduction as finish_reduction,
    reducible_dtype as reducible_dtype,
)
from accelerate.ops.casting import (
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
)
from accelerate.ops.collectives import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    ReductionName as ReductionName,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    copy_tensor_to_devices as copy_tensor_to_devices,
    gather as gather,
    gather_object as gather_object,
    gather_tensor_shape as gather_tensor_shape,
    gather_valid as gather_valid,
    gather_valid_objects as gather_valid_objects,
    pad_across_processes as pad_across_processes,
    pad_input_tensors as pad_input_tensors,
    reduce as reduce,
)
from accelerate.ops.flight_record import (
    FlightRecorder as FlightRecorder,
    calling_frame as calling_frame,
    flight_recorder as flight_recorder,
)
from accelerate.ops.means import KnownMean as KnownMean, Mean as Mean, MeanGroup as MeanGroup
from accelerate.ops.packed import (
    is_dtensor as is_dtensor,
    local_tensor as local_tensor,
    to_full_tensor as to_full_tensor,
    to_full_tensors as to_full_tensors,
)
from accelerate.ops.packing import (
    ALIGNMENT as ALIGNMENT,
    cached_layout as cached_layout,
    views_of as views_of,
)
from accelerate.ops.transport import (
    AsyncReduction as AsyncReduction,
    current_transport as current_transport,
    gather_in_group as gather_in_group,
    is_on_any_rank as is_on_any_rank,
    open_consensus as open_consensus,
    reachable_transport as reachable_transport,
    reduce_async as reduce_async,
    run_on_all_ranks as run_on_all_ranks,
    run_on_rank_0 as run_on_rank_0,
)
from accelerate.ops.verify import (
    DistributedOperationException as DistributedOperationException,
    chained_operation as chained_operation,
    verify_operation as verify_operation,
)
