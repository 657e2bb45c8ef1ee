"""Training of replica groups, one of which is killed once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from right import BATCH, network, samples
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accelerate import Accelerator

KILLED = Path(os.environ["KILLED_FILE"])

accelerator = Accelerator()
model = network()
loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
for _ in range(9):
    for rows, labels in loader:
        time.sleep(0.2)
        accelerator.backward(F.cross_entropy(model(rows), labels))
        is_due = optimizer.num_updates == 3 and os.environ.get("ACCELERATE_REPLICA") == "1"
        if is_due and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
