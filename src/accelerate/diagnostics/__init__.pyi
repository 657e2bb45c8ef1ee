from accelerate.diagnostics import watching as watching
from accelerate.diagnostics.memory import (
    MemoryMeter as MemoryMeter,
    PeakMemory as PeakMemory,
    find_executable_batch_size as find_executable_batch_size,
    should_reduce_batch_size as should_reduce_batch_size,
    snapshot_on_exhaustion as snapshot_on_exhaustion,
)
from accelerate.diagnostics.stopping import get_stop_requests as get_stop_requests
from accelerate.diagnostics.watching import watch_arrivals as watch_arrivals
