"""Log a run to an experiment tracker.

    accelerate launch --cpu --num_processes 2 examples/by_feature/tracking.py --log_with tensorboard

`init_trackers`, `log` and `end_training` are called on all ranks; only the main process has a run. Logged
values stay tensors: the loop does not wait for them. Without `--log_with` nothing is logged.
"""

import torch
from digits_task import build_model, build_optimizer, load_images, measure_accuracy, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    arguments = parse_arguments(
        "Train, and log what happens.",
        log_with={"nargs": "*", "default": [], "help": "trackers: tensorboard, wandb, mlflow, ..."},
        project_dir={"default": "runs/tracking", "help": "folder of trackers that write to one"},
    )
    accelerator = Accelerator(log_with=arguments.log_with, project_dir=arguments.project_dir)
    accelerator.init_trackers("digits", config={"num_epochs": arguments.num_epochs, "hidden": 128})
    set_seed(42)
    train_loader, test_loader = load_images()
    model = build_model()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, build_optimizer(model), train_loader, test_loader
    )

    step = 0
    for epoch in range(arguments.num_epochs):
        total_loss = torch.zeros((), device=accelerator.device)
        for images, labels in train_loader:
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total_loss += loss.detach()
            step += 1
        mean_loss = accelerator.reduce(total_loss / len(train_loader), reduction="mean")
        accuracy = measure_accuracy(accelerator, model, test_loader)
        accelerator.log({"loss": mean_loss, "accuracy": accuracy, "epoch": epoch}, step=step)

    accelerator.print(f"accuracy: {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
