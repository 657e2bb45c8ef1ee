"""Loaders with workers, pinned memory and copies that do not wait."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from accelerate.utils import DataLoaderConfiguration

from .bandwidth import measure_bandwidth
from .setting import Setting

WORKERS = 2


class Rows(Dataset[torch.Tensor]):
    """Rows of one number each: that of the row."""

    def __init__(self, count: int, width: int) -> None:
        self.count, self.width = count, width

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(index))


def read_batches(setting: Setting) -> None:
    """Read an epoch with blocking copies and one with others; each row arrives once and whole."""
    measure_bandwidth(setting)
    # Batches of 8 MB, so that those on their way fit the shared memory of a container.
    rows = Rows(setting.size(2048, 48), setting.size(32 * 1024, 64))
    for non_blocking in (False, True):
        read_epoch(setting, rows, non_blocking)


def read_epoch(setting: Setting, rows: Rows, non_blocking: bool) -> None:
    configuration = DataLoaderConfiguration(non_blocking=non_blocking)
    accelerator = setting.make_accelerator(dataloader_config=configuration)
    batch_size = setting.size(64, 8)
    pins = not setting.is_host
    loader = DataLoader(rows, batch_size=batch_size, shuffle=True, num_workers=WORKERS, pin_memory=pins)
    if pins:
        assert next(iter(loader)).is_pinned()
    prepared = accelerator.prepare(loader)
    seen: list[torch.Tensor] = []
    seconds = setting.time(lambda: read(prepared, setting, seen))
    numbers = torch.cat(seen).tolist()
    assert sorted(numbers) == [*range(len(rows))], "rows are missing, doubled or incomplete"
    name = "non-blocking" if non_blocking else "blocking"
    setting.report(f"{name} copies", len(rows) * rows.width * 4 / seconds, "B/s")


def read(loader: Any, setting: Setting, seen: list[torch.Tensor]) -> None:
    """Take the number of each row; one whose elements differ, since its copy was not complete, gets none."""
    numbers = []
    for batch in loader:
        assert batch.device.type == setting.device
        low, high = batch.amin(1), batch.amax(1)
        numbers.append(torch.where(low == high, low, -1.0))
    seen.extend(each.cpu() for each in numbers)
