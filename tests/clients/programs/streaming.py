"""datasets that are streamed from files: which rows each process sees, and what a loop over them learns.

Usage: streaming.py FOLDER [ways=JSON], names of ways to read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import gather_object

WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "read by each": {"dispatch_batches": False},
    "dispatched": {"dispatch_batches": True},
    "split": {"split_batches": True},
    "dispatched and split": {"split_batches": True, "dispatch_batches": True},
    "read by each and split": {"split_batches": True, "dispatch_batches": False},
}
ROWS, FILES, BATCH = 37, 4, 4


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        rows = [{"place": place, "inputs": [place % 7, 1.0]} for place in range(number, ROWS, FILES)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{number}.jsonl").write_text(text, encoding="utf-8")


def stream(folder: Path) -> Any:
    files = sorted(map(str, folder.glob("*.jsonl")))
    return load_dataset("json", data_files=files, split="train", streaming=True).with_format("torch")


def loader_of(accelerator: Accelerator, rows: Any, way: dict[str, Any], workers: int = 0) -> Any:
    for name, value in {**vars(DataLoaderConfiguration()), **way}.items():
        setattr(accelerator.dataloader_config, name, value)
    return accelerator.prepare(DataLoader(rows, batch_size=BATCH, num_workers=workers))


def places(batches: Any) -> list[Any]:
    return [batch["place"].tolist() for batch in batches]


def seen(batches: Any) -> list[Any]:
    """Places of rows, batch by batch, of each process."""
    return gather_object([places(batches)])


def counted(accelerator: Accelerator, loader: Any) -> list[int]:
    """Places of rows as metrics get them: each once."""
    found = [accelerator.gather_for_metrics(batch["place"]).tolist() for batch in loader]
    return [place for batch in found for place in batch]


def learn(accelerator: Accelerator, loader: Any) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                guess = model(batch["inputs"].float())[:, 0]
                loss = (guess - batch["place"].float() / ROWS).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def main() -> None:
    folder = Path(sys.argv[1]) / "rows"
    wanted = json.loads(sys.argv[2].removeprefix("ways=")) if sys.argv[2:] else list(WAYS)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if accelerator.is_main_process:
        write(folder)
    accelerator.wait_for_everyone()

    def read(rows: Any, name: str, workers: int = 0) -> Any:
        return loader_of(accelerator, rows, WAYS[name], workers)

    found: dict[str, Any] = {}
    for name in wanted:
        found[name] = seen(read(stream(folder), name))
        found[f"{name}, counted"] = counted(accelerator, read(stream(folder), name))
    shuffled, first = stream(folder).shuffle(seed=5, buffer_size=8), wanted[0]
    found["shuffled"] = seen(read(shuffled, first))
    found["workers"] = seen(read(stream(folder), first, workers=2))
    found["skipped"] = seen(skip_first_batches(read(stream(folder), first), 2))
    found["losses"] = learn(accelerator, read(shuffled, first))
    if accelerator.is_main_process:
        print("FOUND " + json.dumps(found), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
