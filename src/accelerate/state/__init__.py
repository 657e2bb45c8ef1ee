"""Who am I among the others: processes, devices and the state that prepared objects share.

The names from elsewhere are part of this import path.
"""

from accelerate.base.enums import DistributedType as DistributedType
from accelerate.base.enums import DynamoBackend as DynamoBackend
from accelerate.base.enums import SageMakerDistributedType as SageMakerDistributedType
from accelerate.base.environ import get_int_from_env as get_int_from_env
from accelerate.base.environ import parse_choice_from_env as parse_choice_from_env
from accelerate.base.environ import parse_flag_from_env as parse_flag_from_env
from accelerate.base.packages import is_datasets_available as is_datasets_available
from accelerate.base.packages import is_deepspeed_available as is_deepspeed_available
from accelerate.devices.affinity import set_numa_affinity as set_numa_affinity
from accelerate.devices.availability import is_fp8_available as is_fp8_available
from accelerate.devices.availability import is_habana_gaudi1 as is_habana_gaudi1
from accelerate.devices.availability import is_hpu_available as is_hpu_available
from accelerate.devices.availability import is_mlu_available as is_mlu_available
from accelerate.devices.availability import is_mps_available as is_mps_available
from accelerate.devices.availability import is_musa_available as is_musa_available
from accelerate.devices.availability import is_neuron_available as is_neuron_available
from accelerate.devices.availability import is_npu_available as is_npu_available
from accelerate.devices.availability import is_sdaa_available as is_sdaa_available
from accelerate.devices.availability import is_torch_xla_available as is_torch_xla_available
from accelerate.devices.availability import is_xccl_available as is_xccl_available
from accelerate.devices.availability import is_xpu_available as is_xpu_available
from accelerate.devices.nvidia import check_cuda_fp8_capability as check_cuda_fp8_capability
from accelerate.devices.nvidia import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accelerate.plugins.training import GradientAccumulationPlugin as GradientAccumulationPlugin
from accelerate.state.accelerator_state import AcceleratorState as AcceleratorState
from accelerate.state.accelerator_state import deepspeed_required as deepspeed_required
from accelerate.state.accelerator_state import is_initialized as is_initialized
from accelerate.state.environments import CPUInformation as CPUInformation
from accelerate.state.environments import get_cpu_distributed_information as get_cpu_distributed_information
from accelerate.state.gradient import GradientState as GradientState
from accelerate.state.partial import PartialState as PartialState
from accelerate.state.partial import wait_for_everyone as wait_for_everyone
from accelerate.state.shared import SharedDict as SharedDict
from accelerate.state.shared import ThreadLocalSharedDict as ThreadLocalSharedDict
from accelerate.state.shared import do_nothing as do_nothing
