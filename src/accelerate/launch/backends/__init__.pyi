from accelerate.launch.backends.base import (
    LAUNCHERS as LAUNCHERS,
    Launcher as Launcher,
    launcher_for as launcher_for,
    launcher_named as launcher_named,
)
from accelerate.launch.backends.deepspeed import (
    FILE_VARIABLE as FILE_VARIABLE,
    python_path as python_path,
    variable_file as variable_file,
)
from accelerate.launch.backends.elastic import ATTEMPTS as ATTEMPTS, ElasticLauncher as ElasticLauncher
from accelerate.launch.backends.local import LocalLauncher as LocalLauncher
from accelerate.launch.backends.mpi import dialect_of as dialect_of, hosts_of as hosts_of
from accelerate.launch.backends.ranks import Ranks as Ranks
from accelerate.launch.backends.sagemaker import SageMakerDetails as SageMakerDetails
from accelerate.launch.backends.tpu import (
    TpuDetails as TpuDetails,
    precision_variables as precision_variables,
)
