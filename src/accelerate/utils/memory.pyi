from accelerate.devices import clear_device_cache as clear_device_cache
from accelerate.diagnostics import should_reduce_batch_size as should_reduce_batch_size
from accelerate.utils import *
