"""Training with `accelerate launch --replicas`, or with `--max_restarts` and checkpoints, in any order."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.recovery import Recovery
from accelerate.state import services
from accelerate.test_utils.scripts.test_failures import Progress
from accelerate.utils import ProjectConfiguration
from chaos.orders import make_parts, train
from chaos.training import (
    ACCUMULATION,
    BATCH,
    EPOCHS,
    FOLDER,
    ORDER,
    PAUSE,
    STEPS_PER_EPOCH,
    TIER,
    Member,
    make_data,
)

REPLICA = os.environ.get("ACCELERATE_REPLICA")
SAVE_EVERY = 5 if REPLICA is None else 4 * STEPS_PER_EPOCH
FAST = {"fast_dir": str(FOLDER / "fast"), "fast_every": 2, "durable_every": 3} if TIER == "fast" else {}
RESTORES_LOADER = REPLICA is not None


def num_members() -> int:
    """Returns the number of replica groups that take the current step."""
    recovery = services.find(Recovery)
    return recovery.members.size if recovery is not None and recovery.members is not None else 0


def main() -> None:
    torch.manual_seed(int(REPLICA or 0))
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1),
        project_config=ProjectConfiguration(
            FOLDER / "project", automatic_checkpoint_naming=True, total_limit=2, **FAST
        ),
    )
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    member = Member(accelerator.process_index if REPLICA is None else int(REPLICA), attempt)
    loader = DataLoader(make_data(), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    parts = make_parts(ORDER)
    first, second, one, two, loader = accelerator.prepare(*parts, loader)
    parts = parts._replace(first=first, second=second, one=one, two=two)
    progress, samples = Progress(), list[int]()
    accelerator.register_for_checkpointing(progress)
    accelerator.register_save_state_pre_hook(lambda *_: member.fail("save"))

    def on_step(*_: object) -> None:
        member.log_step(progress.step + 1, epoch, samples, num_members())
        member.fail("step")

    if ORDER == "closure":  # which is called inside of the step
        one.register_step_post_hook(on_step)
    else:
        one.register_step_pre_hook(on_step)
    if REPLICA is None or TIER == "fast":
        with suppress(FileNotFoundError):  # none is saved, or none is held by all groups
            accelerator.load_state()
    first_step = progress.step
    member.log.write("start", step=first_step)
    for epoch in range(progress.epoch, EPOCHS):
        skipped = 0 if RESTORES_LOADER else progress.batch
        for rows, labels, numbers in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            member.step = progress.step
            member.fail("batch")
            member.fail("exit")
            samples += numbers.tolist()
            with accelerator.accumulate(first, second):
                if accelerator.sync_gradients:
                    member.log_attempt(progress.step + 1, epoch, samples, num_members())
                    time.sleep(PAUSE)
                train(ORDER, accelerator, parts, rows, labels, member.fail)
            progress.batch += 1
            if accelerator.sync_gradients:
                samples.clear()
                if not accelerator.optimizer_step_was_skipped:
                    progress.step += 1
                    if TIER != "fast" and progress.step % SAVE_EVERY == 0:
                        accelerator.save_state()
        progress.epoch, progress.batch = epoch + 1, 0
    others = {f"second.{name}": value for name, value in accelerator.get_state_dict(second).items()}
    state = {**accelerator.get_state_dict(first), **others}
    # A replica group that starts again after the others have ended has the weights of its last checkpoint.
    if accelerator.process_index == 0 and (REPLICA is None or progress.step > first_step):
        member.log_weights(state)


if __name__ == "__main__":
    main()
