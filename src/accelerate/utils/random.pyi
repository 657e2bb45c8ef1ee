from accelerate.base import CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES
from accelerate.state import AcceleratorState as AcceleratorState
from accelerate.utils import *
