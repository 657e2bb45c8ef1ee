from accelerate.ops.agreement import (
    CollectiveConsensus as CollectiveConsensus,
    open_consensus as open_consensus,
    run_on_all_ranks as run_on_all_ranks,
    run_on_rank_0 as run_on_rank_0,
)
from accelerate.ops.async_reduce import (
    Answer as Answer,
    AsyncGroup as AsyncGroup,
    reduce_async as reduce_async,
)
from accelerate.ops.base import Transport as Transport, one_for_each as one_for_each
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
)
from accelerate.ops.dtensors import (
    gather_values as gather_values,
    is_dtensor as is_dtensor,
    reduce_values as reduce_values,
    whole_tensors as whole_tensors,
)
from accelerate.ops.dtypes import (
    as_carried as as_carried,
    finished_reduction as finished_reduction,
    reducible_dtype as reducible_dtype,
)
from accelerate.ops.flat_buffers import joined_shape as joined_shape
from accelerate.ops.flight_record import (
    LENGTH as LENGTH,
    Entry as Entry,
    RecordingTransport as RecordingTransport,
    Ring as Ring,
    calling_frame as calling_frame,
    flight_recorder as flight_recorder,
    line_of as line_of,
)
from accelerate.ops.header import Head as Head, width_of as width_of
from accelerate.ops.objects import (
    broadcast_object as broadcast_object,
    gather_objects as gather_objects,
    share_numbers as share_numbers,
)
from accelerate.ops.packed import (
    broadcast_packed as broadcast_packed,
    gather_packed as gather_packed,
    reduce_packed as reduce_packed,
)
from accelerate.ops.packing import (
    ALONE as ALONE,
    Plan as Plan,
    mark_of as mark_of,
    plan_for as plan_for,
    put_together as put_together,
    take_apart as take_apart,
)
from accelerate.ops.padding import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    pad_across_processes as pad_across_processes,
    pad_input_tensors as pad_input_tensors,
)
from accelerate.ops.rows import (
    at_least_1d as at_least_1d,
    first_rows as first_rows,
    gather_rows as gather_rows,
    row_fact as row_fact,
)
from accelerate.ops.transport import current_transport as current_transport
from accelerate.ops.verify import (
    Call as Call,
    CallSummary as CallSummary,
    DistributedOperationException as DistributedOperationException,
    chained_operation as chained_operation,
    checking_head as checking_head,
    mismatch as mismatch,
    must_verify as must_verify,
    operation as operation,
    outline as outline,
    summarize as summarize,
    verify_operation as verify_operation,
    verify_shapes as verify_shapes,
)
from accelerate.ops.wires import (
    NeuronTransport as NeuronTransport,
    TorchTransport as TorchTransport,
    XlaTransport as XlaTransport,
)
