from accelerate.strategies.dtensors.assignments import (
    AssignedData as AssignedData,
    explain_step_errors as explain_step_errors,
)
from accelerate.strategies.dtensors.gradients import (
    Replicas as Replicas,
    sparse_weights as sparse_weights,
    sum_gradients as sum_gradients,
)
from accelerate.strategies.dtensors.names import (
    clean_name as clean_name,
    fsdp2_canonicalize_names as fsdp2_canonicalize_names,
    named_parameters as named_parameters,
    names_by_group as names_by_group,
)
from accelerate.strategies.dtensors.norms import (
    Groups as Groups,
    Parameters as Parameters,
    clip_values as clip_values,
    combine_powers as combine_powers,
    gradient_norm as gradient_norm,
    groups_of as groups_of,
    local_gradients as local_gradients,
    scale_down as scale_down,
)
from accelerate.strategies.dtensors.optimizers import (
    ParameterRemapper as ParameterRemapper,
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accelerate.strategies.dtensors.second_derivatives import (
    NO_SECOND_DERIVATIVES as NO_SECOND_DERIVATIVES,
    ONE_BACKWARD as ONE_BACKWARD,
    refuse_second_derivatives as refuse_second_derivatives,
)
from accelerate.strategies.dtensors.shards import (
    MAIN as MAIN,
    PLAIN_KINDS as PLAIN_KINDS,
    distribute_like as distribute_like,
    empty_model as empty_model,
    has_dtensors as has_dtensors,
    is_sharded as is_sharded,
    parameter_like as parameter_like,
    place_unsharded as place_unsharded,
    send_from_main as send_from_main,
    send_unsharded as send_unsharded,
    whole_tensor as whole_tensor,
)
from accelerate.strategies.dtensors.units import (
    UnitsFreedBeforeSteps as UnitsFreedBeforeSteps,
    apply_to_shards as apply_to_shards,
    free_unit as free_unit,
    gradient_sync as gradient_sync,
    has_no_backward as has_no_backward,
    keep_gathered as keep_gathered,
    reduction_in_replicas as reduction_in_replicas,
    units_of as units_of,
)
