"""Gradient accumulation: several micro-batches make one update that equals that of one large batch.

    accelerate launch --cpu --num_processes 2 examples/by_feature/gradient_accumulation.py

The training loop does not change inside `accelerator.accumulate(model)`. `optimizer.step()` and `zero_grad()`
do nothing until enough batches have been processed, the loss is divided, and gradients are all-reduced once
per update. If fewer batches remain at the end of an epoch, they make an update too.
"""

from digits_task import build_model, build_optimizer, load_images, measure_accuracy, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    arguments = parse_arguments(
        "Train with accumulated gradients.",
        gradient_accumulation_steps={"type": int, "default": 4, "help": "batches for one update"},
    )
    accelerator = Accelerator(gradient_accumulation_steps=arguments.gradient_accumulation_steps)
    set_seed(42)
    train_loader, test_loader = load_images(batch_size=8)
    model = build_model()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, build_optimizer(model), train_loader, test_loader
    )

    num_updates = 0
    for _ in range(arguments.num_epochs):
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
            num_updates += accelerator.sync_gradients

    num_batches = arguments.num_epochs * len(train_loader)
    accelerator.print(f"{num_batches} batches on each process made {num_updates} updates")
    accelerator.print(f"accuracy: {measure_accuracy(accelerator, model, test_loader):.3f}")


if __name__ == "__main__":
    main()
