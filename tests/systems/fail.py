"""Rank 1 fails while rank 0 waits."""

import time

from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    raise KeyError("rank 1 fails")
time.sleep(600)
