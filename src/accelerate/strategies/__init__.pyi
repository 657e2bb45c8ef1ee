from accelerate.strategies.axes import (
    list_experts as list_experts,
    sequence_state as sequence_state,
    trace_share as trace_share,
    whole_losses as whole_losses,
)
from accelerate.strategies.base import (
    Strategy as Strategy,
    as_list as as_list,
    keep_file as keep_file,
    refuse_split_model as refuse_split_model,
)
from accelerate.strategies.composition import compose as compose, divide_steps as divide_steps
from accelerate.strategies.ddp import (
    DataParallel as DataParallel,
    adopt_order as adopt_order,
    order_of as order_of,
    sync_in_backward as sync_in_backward,
)
from accelerate.strategies.dtensors import sum_gradients as sum_gradients
from accelerate.strategies.fsdp import (
    ReplicatedTensorParallel as ReplicatedTensorParallel,
    TensorParallel as TensorParallel,
)
from accelerate.strategies.isolation import check_isolation as check_isolation
from accelerate.strategies.layer import Layer as Layer
from accelerate.strategies.module_state import ModuleState as ModuleState, SavedBuffer as SavedBuffer
from accelerate.strategies.recomputation import (
    choose_for_step as choose_for_step,
    chosen_policy as chosen_policy,
    tracer_for as tracer_for,
)
from accelerate.strategies.recomputed_blocks import (
    keep_activations as keep_activations,
    recompute_in_trace as recompute_in_trace,
)
from accelerate.strategies.request import Context as Context, RunRequest as RunRequest
from accelerate.strategies.resolve import (
    prepare_devices as prepare_devices,
    resolve_strategy as resolve_strategy,
)
from accelerate.strategies.session import (
    Bundle as Bundle,
    Kind as Kind,
    Prepared as Prepared,
    PrepareSession as PrepareSession,
    ReplacedParameters as ReplacedParameters,
    find_unrelated_optimizers as find_unrelated_optimizers,
    find_unstepped_models as find_unstepped_models,
    is_prepared as is_prepared,
    kind_of as kind_of,
    mark_prepared as mark_prepared,
    parameter_ids as parameter_ids,
)
from accelerate.strategies.state import owners_of as owners_of
