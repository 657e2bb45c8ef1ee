"""Local SGD: ranks train independently and average their weights every few steps.

    accelerate launch --cpu --num_processes 2 examples/by_feature/local_sgd.py

DistributedDataParallel all-reduces gradients at every step, which is costly on a slow network. Inside
`LocalSGD` the ranks take several steps independently, and only their weights are averaged, every few steps.
"""

import torch
from digits_task import build_model, build_optimizer, load_images, measure_accuracy, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed


def main() -> None:
    arguments = parse_arguments(
        "Train with Local SGD.",
        local_sgd_steps={"type": int, "default": 8, "help": "steps between two averages"},
    )
    accelerator = Accelerator()
    set_seed(42)
    train_loader, test_loader = load_images()
    model = build_model()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, build_optimizer(model), train_loader, test_loader
    )

    for _ in range(arguments.num_epochs):
        with LocalSGD(accelerator, model, arguments.local_sgd_steps) as local_sgd:
            for images, labels in train_loader:
                accelerator.backward(cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()

    # The last block ends with an average: all ranks hold the same weights.
    first_weights = next(model.parameters()).detach()
    for other in accelerator.gather(first_weights.unsqueeze(0)):
        torch.testing.assert_close(other, first_weights)
    accelerator.print(f"accuracy: {measure_accuracy(accelerator, model, test_loader):.3f}")


if __name__ == "__main__":
    main()
