from accelerate.base import (
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    SageMakerDistributedType as SageMakerDistributedType,
    get_int_from_env as get_int_from_env,
    is_datasets_available as is_datasets_available,
    is_deepspeed_available as is_deepspeed_available,
    parse_choice_from_env as parse_choice_from_env,
    parse_flag_from_env as parse_flag_from_env,
)
from accelerate.devices import (
    check_cuda_fp8_capability as check_cuda_fp8_capability,
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
    is_fp8_available as is_fp8_available,
    is_habana_gaudi1 as is_habana_gaudi1,
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_sdaa_available as is_sdaa_available,
    is_torch_xla_available as is_torch_xla_available,
    is_xccl_available as is_xccl_available,
    is_xpu_available as is_xpu_available,
    set_numa_affinity as set_numa_affinity,
)
from accelerate.plugins import GradientAccumulationPlugin as GradientAccumulationPlugin
from accelerate.state.accelerator_state import (
    ONE_STATE as ONE_STATE,
    AcceleratorState as AcceleratorState,
    deepspeed_required as deepspeed_required,
    is_initialized as is_initialized,
    mesh_sizes as mesh_sizes,
)
from accelerate.state.agreement import (
    Consensus as Consensus,
    ReduceFunction as ReduceFunction,
    StoreChannel as StoreChannel,
    StoreConsensus as StoreConsensus,
    as_dataclass as as_dataclass,
    pack_decision as pack_decision,
    unpack_decision as unpack_decision,
)
from accelerate.state.connections import Connections as Connections, connect_nodes as connect_nodes
from accelerate.state.driving_loader import DrivingLoader as DrivingLoader
from accelerate.state.environments import (
    CPUInformation as CPUInformation,
    Topology as Topology,
    get_cpu_distributed_information as get_cpu_distributed_information,
)
from accelerate.state.exits import closed_at_exit as closed_at_exit
from accelerate.state.gradient import GradientState as GradientState, GradientStates as GradientStates
from accelerate.state.partial import PartialState as PartialState, wait_for_everyone as wait_for_everyone
from accelerate.state.processes import (
    ProcessControl as ProcessControl,
    plan_split as plan_split,
    split_for_rank as split_for_rank,
)
from accelerate.state.shared import (
    Leader as Leader,
    Observers as Observers,
    ProcessServices as ProcessServices,
    SharedDict as SharedDict,
    SharedState as SharedState,
    ThreadLocalSharedDict as ThreadLocalSharedDict,
    WeakReference as WeakReference,
    do_nothing as do_nothing,
    record_event as record_event,
    run_observers as run_observers,
    run_records as run_records,
    services as services,
    step_clock as step_clock,
)
