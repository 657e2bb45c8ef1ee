"""Who am I among the others: processes, devices and the state that prepared objects share."""

from accelerate.base.enums import DistributedType as DistributedType
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
