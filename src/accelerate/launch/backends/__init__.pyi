from accelerate.launch.backends.base import (
    Launcher as Launcher,
    launcher_for as launcher_for,
    launcher_named as launcher_named,
)
from accelerate.launch.backends.sagemaker import (
    SageMakerDetails as SageMakerDetails,
    _convert_nargs_to_dict as _convert_nargs_to_dict,
)
from accelerate.launch.backends.tpu import precision_variables as precision_variables
