"""Train with DeepSpeed and its configuration file.

    accelerate launch --cpu --num_processes 2 --use_deepspeed \
        --deepspeed_config_file examples/by_feature/zero2.json examples/by_feature/deepspeed_with_config.py

The JSON file names optimizer and scheduler; `DummyOptim` and `DummyScheduler` are placeholders for them, and
set the values that are "auto" in the file. Without DeepSpeed's flags the script trains with optimizer and
scheduler of torch.
"""

import torch
from digits_task import build_model, load_images, measure_accuracy, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, set_seed

LEARNING_RATE = 0.01


def main() -> None:
    arguments = parse_arguments("Train by DeepSpeed.")
    accelerator = Accelerator()
    set_seed(42)
    train_loader, test_loader = load_images()
    model = build_model()
    steps = arguments.num_epochs * len(train_loader)
    optimizer, scheduler = choose(accelerator, model, steps)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    for _ in range(arguments.num_epochs):
        for images, labels in train_loader:
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    accelerator.print(f"accuracy: {measure_accuracy(accelerator, model, test_loader):.3f}")


def choose(accelerator: Accelerator, model: torch.nn.Module, steps: int) -> tuple[object, object]:
    """Return optimizer and scheduler, or placeholders for those in DeepSpeed's configuration."""
    plugin = accelerator.deepspeed_plugin
    if plugin is None or "optimizer" not in plugin.deepspeed_config:
        own = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        return own, torch.optim.lr_scheduler.LinearLR(own, 1.0, 0.01, total_iters=steps)
    stand_in = DummyOptim(model.parameters(), lr=LEARNING_RATE)
    return stand_in, DummyScheduler(stand_in, total_num_steps=steps, warmup_num_steps=steps // 20)


if __name__ == "__main__":
    main()
