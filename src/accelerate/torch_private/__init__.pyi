from typing import Any

from accelerate.torch_private.attention import (
    attention_replaced as attention_replaced,
    call_after_backward as call_after_backward,
    function_replaced as function_replaced,
    is_in_backward as is_in_backward,
)
from accelerate.torch_private.drawing import (
    draw_for_whole_batches as draw_for_whole_batches,
    seeded as seeded,
    turn_off_dropout as turn_off_dropout,
    turn_off_dropout_of as turn_off_dropout_of,
)
from accelerate.torch_private.fsdp import (
    FLAT_PARAMETER as FLAT_PARAMETER,
    FlatUnit as FlatUnit,
    TakenGradients as TakenGradients,
    drop_unreduced_gradients as drop_unreduced_gradients,
    flat_units as flat_units,
    gradient_sync as gradient_sync,
    is_freed_after_forward as is_freed_after_forward,
    is_unit_of_fsdp2 as is_unit_of_fsdp2,
    kept_after_forward as kept_after_forward,
    meshes_of_fsdp2 as meshes_of_fsdp2,
    original_buffer_dtypes as original_buffer_dtypes,
    parameters_and_shards as parameters_and_shards,
    phases_of_fsdp2 as phases_of_fsdp2,
    run_policy as run_policy,
    set_gradient_sync as set_gradient_sync,
    unit_forwards_skipped as unit_forwards_skipped,
    unreduced_gradients as unreduced_gradients,
    unreduced_gradients_kept as unreduced_gradients_kept,
    uses_original_parameters as uses_original_parameters,
    zero_sharded_gradients as zero_sharded_gradients,
)
from accelerate.torch_private.gradients import (
    base_of as base_of,
    comm_hooks as comm_hooks,
    ddp_statistics as ddp_statistics,
    in_place_version as in_place_version,
    in_place_versions as in_place_versions,
    is_joining as is_joining,
    is_view as is_view,
    version_counter as version_counter,
)
from accelerate.torch_private.loaders import (
    WAIT_FOR_BATCH as WAIT_FOR_BATCH,
    WORKER_LOOP as WORKER_LOOP,
    count_yielded as count_yielded,
    dataset_state as dataset_state,
    has_dataset_state as has_dataset_state,
    loader_progress as loader_progress,
    loader_tasks as loader_tasks,
    loader_workers as loader_workers,
    read_sample as read_sample,
    replace_fetch as replace_fetch,
    requested_samples as requested_samples,
    sources_of as sources_of,
    watch_indices as watch_indices,
    wrap_indices as wrap_indices,
)
from accelerate.torch_private.modules import (
    WRAPPED as WRAPPED,
    Weights as Weights,
    call_forward_hooks as call_forward_hooks,
    count_compilations as count_compilations,
    count_recompilations as count_recompilations,
    forward_hooks as forward_hooks,
    has_gradient_hooks as has_gradient_hooks,
    has_load_hooks as has_load_hooks,
    is_compiled_in_place as is_compiled_in_place,
    is_optimized_module as is_optimized_module,
    non_persistent_buffers as non_persistent_buffers,
    num_forward_hooks as num_forward_hooks,
    placeholder_weights as placeholder_weights,
    recomputed_module as recomputed_module,
    remove_weights as remove_weights,
    replaced_weights as replaced_weights,
    state_dict_hooks as state_dict_hooks,
    uncompiled as uncompiled,
)
from accelerate.torch_private.names import NAMES as NAMES, PrivateName as PrivateName
from accelerate.torch_private.optimizers import (
    allow_fp16_gradients as allow_fp16_gradients,
    found_inf as found_inf,
    reset_unscaled as reset_unscaled,
    set_scheduler_optimizer as set_scheduler_optimizer,
    step_replaced as step_replaced,
    unscale_shards as unscale_shards,
)
from accelerate.torch_private.pipelining import (
    UnevenPipelineStage as UnevenPipelineStage,
    is_in_reentrant_checkpoint as is_in_reentrant_checkpoint,
    watch_clipping as watch_clipping,
)
from accelerate.torch_private.processes import (
    agent_hooks as agent_hooks,
    default_to_stores_without_libuv as default_to_stores_without_libuv,
    flatten_mesh as flatten_mesh,
    has_opened_group as has_opened_group,
    num_collectives as num_collectives,
    root_mesh as root_mesh,
    skip_connection_messages as skip_connection_messages,
)
from accelerate.torch_private.tracing import (
    arguments_of as arguments_of,
    call_with as call_with,
    draws_random_numbers as draws_random_numbers,
    fake_parameters_converted as fake_parameters_converted,
    find_recomputation as find_recomputation,
    is_operator as is_operator,
    log_silenced as log_silenced,
    memory_dump as memory_dump,
    memory_recorder as memory_recorder,
    mutated_by as mutated_by,
    operator as operator,
    packet_of as packet_of,
    peak_on_cpu as peak_on_cpu,
    record_moments as record_moments,
    replace_module_hooks as replace_module_hooks,
    selective_checkpoint_contexts as selective_checkpoint_contexts,
    skip_frozen_gradients as skip_frozen_gradients,
    storage_id as storage_id,
    tracked_bytes as tracked_bytes,
    weak_storage as weak_storage,
)

def __getattr__(name: str) -> Any: ...
