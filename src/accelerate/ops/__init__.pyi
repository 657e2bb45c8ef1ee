from accelerate.ops.agreement import (
    CollectiveConsensus as CollectiveConsensus,
    open_consensus as open_consensus,
    run_on_all_ranks as run_on_all_ranks,
    run_on_rank_0 as run_on_rank_0,
)
from accelerate.ops.base import (
    Header as Header,
    Transport as Transport,
    as_supported as as_supported,
    finished_reduction as finished_reduction,
    one_for_each as one_for_each,
    reducible_dtype as reducible_dtype,
    width_of as width_of,
)
from accelerate.ops.casting import (
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
)
from accelerate.ops.collectives import (
    ReductionName as ReductionName,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    copy_tensor_to_devices as copy_tensor_to_devices,
    gather as gather,
    gather_object as gather_object,
    gather_tensor_shape as gather_tensor_shape,
    gather_uneven as gather_uneven,
    gather_valid as gather_valid,
    gather_valid_objects as gather_valid_objects,
    reduce as reduce,
    wait_for_everyone as wait_for_everyone,
)
from accelerate.ops.flight_record import (
    LENGTH as LENGTH,
    Entry as Entry,
    Ring as Ring,
    calling_frame as calling_frame,
    flight_recorder as flight_recorder,
    line_of as line_of,
    recorded as recorded,
)
from accelerate.ops.packed import (
    broadcast_object as broadcast_object,
    broadcast_packed as broadcast_packed,
    gather_objects as gather_objects,
    gather_packed as gather_packed,
    gather_values as gather_values,
    is_dtensor as is_dtensor,
    reduce_packed as reduce_packed,
    reduce_values as reduce_values,
    share_numbers as share_numbers,
    whole_tensors as whole_tensors,
)
from accelerate.ops.packing import (
    ALIGNMENT as ALIGNMENT,
    ALONE as ALONE,
    TransferPlan as TransferPlan,
    joined_shape as joined_shape,
    lay_out_once as lay_out_once,
    mark_of as mark_of,
    plan_for as plan_for,
    put_together as put_together,
    take_apart as take_apart,
    views_of as views_of,
)
from accelerate.ops.padding import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    at_least_1d as at_least_1d,
    first_rows as first_rows,
    gather_rows as gather_rows,
    pad_across_processes as pad_across_processes,
    pad_input_tensors as pad_input_tensors,
    row_fact as row_fact,
)
from accelerate.ops.transport import (
    Answer as Answer,
    AsyncGroup as AsyncGroup,
    NeuronTransport as NeuronTransport,
    TorchTransport as TorchTransport,
    XlaTransport as XlaTransport,
    current_transport as current_transport,
    reduce_async as reduce_async,
)
from accelerate.ops.verify import (
    Call as Call,
    CallSummary as CallSummary,
    DistributedOperationException as DistributedOperationException,
    chained_operation as chained_operation,
    checking_header as checking_header,
    mismatch as mismatch,
    must_verify as must_verify,
    operation as operation,
    outline as outline,
    summarize as summarize,
    verify_operation as verify_operation,
    verify_shapes as verify_shapes,
)
