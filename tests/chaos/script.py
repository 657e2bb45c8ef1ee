"""Training with `accelerate launch --replicas`, or with `--max_restarts` and checkpoints."""

from __future__ import annotations

import os
import time
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.recovery import Recovery
from accelerate.state import services
from accelerate.test_utils.scripts.test_failures import Progress
from accelerate.utils import ProjectConfiguration
from chaos.training import BATCH, EPOCHS, FOLDER, PAUSE, STEPS_PER_EPOCH, Member, make_data, make_model

REPLICA = os.environ.get("ACCELERATE_REPLICA")
SAVE_EVERY = 5 if REPLICA is None else 4 * STEPS_PER_EPOCH


def num_members() -> int:
    """Returns the number of replica groups that take the current step."""
    recovery = services.find(Recovery)
    return recovery.members.size if recovery is not None and recovery.members is not None else 0


def main() -> None:
    torch.manual_seed(int(REPLICA or 0))
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1),
        project_config=ProjectConfiguration(
            FOLDER / "project", automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    member = Member(accelerator.process_index if REPLICA is None else int(REPLICA), attempt)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(make_data(), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress, samples = Progress(), list[int]()
    accelerator.register_for_checkpointing(progress)
    accelerator.register_save_state_pre_hook(lambda *_: member.fail("save"))

    def on_step(*_: object) -> None:
        member.log_step(progress.step + 1, epoch, samples, num_members())
        member.fail("step")

    optimizer.register_step_pre_hook(on_step)
    if REPLICA is None and any(FOLDER.glob("project/checkpoints/checkpoint_*")):
        accelerator.load_state()
    member.log.write("start", step=progress.step)
    for epoch in range(progress.epoch, EPOCHS):
        batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
        for rows, labels, numbers in batches:
            member.fail("batch")
            member.fail("exit")
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.register_hook(partial(lambda place, _: member.fail(place), "backward"))
            samples += numbers.tolist()
            if accelerator.sync_gradients:
                member.log_attempt(progress.step + 1, epoch, samples, num_members())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                time.sleep(PAUSE)
            optimizer.step()
            optimizer.zero_grad()
            progress.batch += REPLICA is None  # loaders of replica groups restore their position
            if accelerator.sync_gradients:
                samples.clear()
                if not accelerator.optimizer_step_was_skipped:
                    progress.step += 1
                    if progress.step % SAVE_EVERY == 0:
                        accelerator.save_state()
        progress.epoch, progress.batch = epoch + 1, 0
    state = accelerator.get_state_dict(model)
    if accelerator.process_index == 0 and progress.step:
        member.log_weights(state)


if __name__ == "__main__":
    main()
