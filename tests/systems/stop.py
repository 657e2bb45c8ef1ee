"""Train until should_stop, and print it."""

import time

from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
assert not accelerator.should_stop
print(f"rank {accelerator.process_index} is ready", flush=True)
end = time.monotonic() + 60
while not accelerator.should_stop and time.monotonic() < end:
    time.sleep(0.02)
accelerator.end_training()
print(f"rank {accelerator.process_index} stopped", flush=True)
