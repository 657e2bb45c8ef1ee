"""Train one model per fold, and combine their predictions by a vote.

    accelerate launch --cpu --num_processes 2 examples/by_feature/cross_validation.py

All folds are trained with one `Accelerator`: `free_memory` releases the prepared objects of the previous
fold. `gather_for_metrics` returns each test image once, in the same order for every fold, so the predictions
of all models can be added.
"""

import torch
from digits_task import build_model, build_optimizer, load_images, parse_arguments
from sklearn.model_selection import KFold
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset

from accelerate import Accelerator
from accelerate.utils import set_seed


def guess(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores (N, 10) and labels (N,) of all images of a loader, on all ranks."""
    scores, labels = [], []
    model.eval()
    for images, truth in loader:
        with torch.no_grad():
            gathered = accelerator.gather_for_metrics((model(images), truth))
        scores.append(gathered[0])
        labels.append(gathered[1])
    return torch.cat(scores), torch.cat(labels)


def train_fold(accelerator: Accelerator, images: Dataset, num_epochs: int) -> nn.Module:
    """Train a new model on some of the images."""
    model = build_model()
    loader = DataLoader(images, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, build_optimizer(model), loader)
    for _ in range(num_epochs):
        for inputs, labels in loader:
            accelerator.backward(cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
    return model


def main() -> None:
    arguments = parse_arguments(
        "Train with cross-validation.", num_folds={"type": int, "default": 3, "help": "models to train"}
    )
    accelerator = Accelerator()
    set_seed(42)
    train_loader, held_out = load_images()
    images = train_loader.dataset
    votes = torch.zeros(len(held_out.dataset), 10)

    folds = KFold(arguments.num_folds, shuffle=True, random_state=0).split(range(len(images)))
    for fold, (kept, left) in enumerate(folds):
        accelerator.free_memory()
        model = train_fold(accelerator, Subset(images, kept.tolist()), arguments.num_epochs)
        left_loader, test_loader = accelerator.prepare(
            DataLoader(Subset(images, left.tolist()), batch_size=64), held_out
        )
        scores, labels = guess(accelerator, model, left_loader)
        accelerator.print(
            f"fold {fold}: {len(labels)} images, accuracy {(scores.argmax(1) == labels).float().mean():.3f}"
        )
        scores, labels = guess(accelerator, model, test_loader)
        votes += scores.softmax(dim=1).cpu()

    accelerator.print(f"accuracy: {(votes.argmax(1) == labels.cpu()).float().mean():.3f}")


if __name__ == "__main__":
    main()
