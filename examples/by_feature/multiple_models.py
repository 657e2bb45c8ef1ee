"""Train two models with two optimizers in one loop.

    accelerate launch --cpu --num_processes 2 examples/by_feature/multiple_models.py

One network compresses an image to eight numbers, the other one predicts the digit from them. Both are
prepared in one call and trained with their own optimizers; `accumulate` takes both models, so that their
gradients are synchronized at the same step.
"""

import torch
from digits_task import LEARNING_RATE, load_images, measure_accuracy, parse_arguments
from torch import nn
from torch.nn.functional import cross_entropy

from accelerate import Accelerator
from accelerate.utils import set_seed

MAX_NORM = 1.0


def main() -> None:
    arguments = parse_arguments("Train an encoder and a classifier.", num_epochs=15)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(42)
    train_loader, test_loader = load_images(batch_size=8)
    encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    classifier = nn.Sequential(nn.ReLU(), nn.Linear(8, 10))
    slow = torch.optim.AdamW(encoder.parameters(), lr=LEARNING_RATE)
    fast = torch.optim.AdamW(classifier.parameters(), lr=2 * LEARNING_RATE)
    encoder, classifier, slow, fast, train_loader, test_loader = accelerator.prepare(
        encoder, classifier, slow, fast, train_loader, test_loader
    )

    for _ in range(arguments.num_epochs):
        for images, labels in train_loader:
            with accelerator.accumulate(encoder, classifier):
                accelerator.backward(cross_entropy(classifier(encoder(images)), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(encoder.parameters(), MAX_NORM)
                for optimizer in (slow, fast):
                    optimizer.step()
                    optimizer.zero_grad()

    both = nn.Sequential(encoder, classifier)
    accelerator.print(f"accuracy: {measure_accuracy(accelerator, both, test_loader):.3f}")


if __name__ == "__main__":
    main()
