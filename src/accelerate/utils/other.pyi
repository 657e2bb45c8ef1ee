from accelerate.base import (
    FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION,
    is_numpy_available as is_numpy_available,
)
from accelerate.devices import is_torch_distributed_available as is_torch_distributed_available
from accelerate.launch import get_free_port as get_free_port
from accelerate.logging import get_logger as get_logger
from accelerate.state import PartialState as PartialState
from accelerate.utils import *
from accelerate.weights import TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS
from accelerate.wrappers import (
    has_repeated_blocks as has_repeated_blocks,
    is_repeated_blocks as is_repeated_blocks,
)
