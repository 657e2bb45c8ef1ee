"""Waits of a background thread while the interpreter exits after an uncaught exception."""

from __future__ import annotations

import subprocess
import sys
import time

SCRIPT = """
import threading
from torch.distributed import HashStore
from accelerate.state.agreement import StoreChannel, StoreConsensus

channel = StoreChannel(HashStore(), "test", {})
channel.timeout_after_error = 1.0

def decide():
    try:
        StoreConsensus(channel, 0, 3).decide("save_state", 1, sum, 600.0)
    except Exception as error:
        print(error, flush=True)

threading.Thread(target=decide).start()
raise ValueError("the script fails")
"""


def test_a_wait_ends_soon_after_the_error() -> None:
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.stdout.strip() == (
        "`save_state` was not completed, because this process has failed and processes 1, 2 did not arrive."
    )
    assert "ValueError: the script fails" in ended.stderr
    assert time.monotonic() - began < 60
