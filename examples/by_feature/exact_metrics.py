"""Compute the same metrics on several ranks as on one process.

    accelerate launch --cpu --num_processes 2 examples/by_feature/exact_metrics.py

The 360 test images do not divide evenly, so some are read twice. `gather_for_metrics` returns each image
once; `weighted_mean` weights each rank's mean by its number of samples. `gather` alone would count the
duplicates.
"""

import torch
from digits_task import build_model, build_optimizer, load_images, parse_arguments
from sklearn.metrics import confusion_matrix
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    arguments = parse_arguments("Train, and measure exactly.")
    accelerator = Accelerator()
    set_seed(42)
    train_loader, test_loader = load_images()
    test_loader = DataLoader(test_loader.dataset, batch_size=7)
    model = build_model()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, build_optimizer(model), train_loader, test_loader
    )
    for _ in range(arguments.num_epochs):
        for images, labels in train_loader:
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    guesses, truth, losses, num_seen = [], [], [], 0
    for images, labels in test_loader:
        with torch.no_grad():
            scores = model(images)
        loss = cross_entropy(scores, labels, reduction="none")
        some_guesses, some_labels, some_losses = accelerator.gather_for_metrics(
            (scores.argmax(dim=1), labels, loss)
        )
        guesses.append(some_guesses)
        truth.append(some_labels)
        losses.append(some_losses)
        num_seen += len(accelerator.gather(labels))
    matrix = confusion_matrix(torch.cat(truth).cpu(), torch.cat(guesses).cpu())

    accelerator.print(f"{num_seen} images were seen, {matrix.sum()} are counted")
    accelerator.print(f"loss: {torch.cat(losses).mean():.4f}")
    accelerator.print(f"accuracy: {matrix.trace() / matrix.sum():.3f}")


if __name__ == "__main__":
    main()
