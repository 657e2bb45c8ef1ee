"""Deprecated import path of `accelerate.utils.memory`."""

import warnings

from accelerate.devices import clear_device_cache as clear_device_cache, release_memory as release_memory
from accelerate.diagnostics import (
    find_executable_batch_size as find_executable_batch_size,
    should_reduce_batch_size as should_reduce_batch_size,
)

warnings.warn(
    "`accelerate.memory_utils` is deprecated: import from `accelerate.utils.memory`.",
    FutureWarning,
    stacklevel=2,
)
