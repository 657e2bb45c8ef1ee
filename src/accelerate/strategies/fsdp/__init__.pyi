from accelerate.strategies.fsdp.checkpoint import (
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from accelerate.strategies.fsdp.merge import merge_fsdp_weights as merge_fsdp_weights
from accelerate.strategies.fsdp.parameters import (
    MainWeights as MainWeights,
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    ensure_weights_retied as ensure_weights_retied,
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
    get_parameters_from_modules as get_parameters_from_modules,
)
from accelerate.strategies.fsdp.sharding import (
    choose_units as choose_units,
    fsdp2_apply_ac as fsdp2_apply_ac,
    fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy,
    fsdp2_prepare_model as fsdp2_prepare_model,
    keep_master_weights as keep_master_weights,
    offload_policy as offload_policy,
    outermost_wrappers as outermost_wrappers,
    parameters_by_unit as parameters_by_unit,
    split_by_dtype as split_by_dtype,
)
from accelerate.strategies.fsdp.strategies import (
    DistributedTensors as DistributedTensors,
    Fsdp2 as Fsdp2,
    ReplicatedTensorParallel as ReplicatedTensorParallel,
    TensorParallel as TensorParallel,
)
from accelerate.strategies.fsdp.v1 import Fsdp1 as Fsdp1
