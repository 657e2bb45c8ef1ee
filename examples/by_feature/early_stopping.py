"""Stop all ranks when one rank requests it.

    accelerate launch --cpu --num_processes 2 examples/by_feature/early_stopping.py

Each rank reads different batches and computes a different loss. If one rank left the loop alone, the other
ranks would hang. `set_trigger` sets a flag on one rank; `check_trigger`, called on all ranks, returns whether
any rank has set it.
"""

from digits_task import build_model, build_optimizer, load_images, measure_accuracy, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    arguments = parse_arguments(
        "Stop when the loss is small.",
        num_epochs=100,
        enough={"type": float, "default": 0.05, "help": "mean loss of an epoch at which a process stops"},
    )
    accelerator = Accelerator()
    set_seed(42)
    train_loader, test_loader = load_images()
    model = build_model()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, build_optimizer(model), train_loader, test_loader
    )

    for epoch in range(1, arguments.num_epochs + 1):
        total_loss = 0.0
        for images, labels in train_loader:
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total_loss += loss.item()
        if total_loss / len(train_loader) < arguments.enough:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.print(f"stopped after epoch {epoch}")
            break

    accelerator.print(f"accuracy: {measure_accuracy(accelerator, model, test_loader):.3f}")


if __name__ == "__main__":
    main()
