"""Training that fails where a file asks for it, and logs the samples of each step."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration

FOLDER, REPLICA = Path(os.environ["CHAOS_FOLDER"]), os.environ.get("ACCELERATE_REPLICA", "0")
EPOCHS, PAUSE = int(os.environ["CHAOS_EPOCHS"]), float(os.environ["CHAOS_PAUSE"])
ORDER = FOLDER / f"fail-{REPLICA}"
SAMPLES, BATCH = 96, 2


def fail(where: str) -> None:
    """Ends this process if the file of its replica group names this place."""
    try:
        asked = ORDER.read_text()
    except FileNotFoundError:
        return
    if asked != where:
        return
    ORDER.unlink(missing_ok=True)
    if where == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    torch.manual_seed(int(REPLICA))
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1),
        project_config=ProjectConfiguration(
            FOLDER / "project", automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    original = optimizer.step

    def step(*args: object, **kwargs: object) -> object:
        fail("step")
        return original(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign, assignment]
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, generator=generator), index % 4, index) for index in range(SAMPLES)]
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_save_state_pre_hook(lambda *_: fail("save"))
    log = (FOLDER / f"steps-{REPLICA}-{os.getpid()}.jsonl").open("a", buffering=1)
    (FOLDER / f"pid-{REPLICA}").write_text(str(os.getpid()))
    for epoch in range(EPOCHS):
        samples: list[int] = []
        for rows, labels, numbers in loader:
            fail("batch")
            fail("exit")
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.register_hook(lambda gradient: fail("backward"))
            accelerator.backward(loss)
            samples += numbers.tolist()
            if accelerator.sync_gradients:
                time.sleep(PAUSE)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                if not accelerator.optimizer_step_was_skipped:
                    record = {"time": time.time(), "epoch": epoch, "samples": samples}
                    log.write(json.dumps(record) + "\n")
                samples = []
        if epoch % 4 == 3:
            accelerator.save_state()
    if accelerator.process_index == 0 and optimizer.num_updates:  # type: ignore[attr-defined]
        torch.save(accelerator.get_state_dict(model), FOLDER / f"end-{REPLICA}.pt")


if __name__ == "__main__":
    main()
