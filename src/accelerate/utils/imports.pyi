from accelerate.base import (
    is_numpy_available as is_numpy_available,
    is_package_available as _is_package_available,
    is_tqdm_available as is_tqdm_available,
)
from accelerate.devices import (
    USE_TORCH_XLA as USE_TORCH_XLA,
    is_torch_distributed_available as is_torch_distributed_available,
)
from accelerate.utils import *
