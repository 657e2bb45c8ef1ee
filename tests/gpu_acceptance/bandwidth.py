"""How fast the device takes bytes from pinned memory: what moving weights and batches is held against."""

from __future__ import annotations

import torch

from .setting import Setting

MIB = 2**20
ROUNDS, COPIES = 5, 8


def measure_bandwidth(setting: Setting) -> float:
    """Return bytes per second from pinned memory to the device, or of copies on the CPU: the best round."""
    size = setting.size(256 * MIB, MIB)
    source = torch.ones(size, dtype=torch.uint8, pin_memory=not setting.is_host)
    target = torch.empty(size, dtype=torch.uint8, device=setting.device)

    def copy() -> None:
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)

    copy()
    seconds = min(setting.time(copy) for _ in range(ROUNDS))
    bandwidth = COPIES * size / seconds
    setting.report("pinned memory to the device", bandwidth, "B/s")
    return bandwidth
