from accelerate.launch.backends.base import (
    LAUNCHERS as LAUNCHERS,
    Launcher as Launcher,
    launcher_for as launcher_for,
    launcher_named as launcher_named,
)
from accelerate.launch.backends.elastic import (
    ATTEMPTS as ATTEMPTS,
    ElasticLauncher as ElasticLauncher,
    LocalLauncher as LocalLauncher,
    Ranks as Ranks,
    check_reach as check_reach,
)
from accelerate.launch.backends.hostfile import (
    FILE_VARIABLE as FILE_VARIABLE,
    DeepSpeedLauncher as DeepSpeedLauncher,
    MpiLauncher as MpiLauncher,
    dialect_of as dialect_of,
    hosts_of as hosts_of,
    variable_file as variable_file,
)
from accelerate.launch.backends.sagemaker import (
    SageMakerDetails as SageMakerDetails,
    SageMakerLauncher as SageMakerLauncher,
    _convert_nargs_to_dict as _convert_nargs_to_dict,
)
from accelerate.launch.backends.slurm import SbatchLauncher as SbatchLauncher, SlurmLauncher as SlurmLauncher
from accelerate.launch.backends.tpu import (
    TpuDetails as TpuDetails,
    TpuLauncher as TpuLauncher,
    TpuPodLauncher as TpuPodLauncher,
    precision_variables as precision_variables,
)
