from accelerate.devices import (
    get_driver_version as get_driver_version,
    override_numa_affinity as override_numa_affinity,
    parse_cpu_list as _parse_cpu_list,
)
from accelerate.state import CPUInformation as CPUInformation
from accelerate.utils import *
