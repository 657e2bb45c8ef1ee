"""Run inference on many inputs with a replica of the model on each rank.

    accelerate launch --cpu --num_processes 2 examples/by_feature/distributed_inference.py

`split_between_processes` gives each rank its part of a list, tensor or dictionary, in order; `gather_object`
gathers the results. Inference needs neither a loader nor `prepare`.
"""

from pathlib import Path

import torch
from digits_task import build_model, build_optimizer, load_images, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import PartialState
from accelerate.utils import gather_object, set_seed


def train_and_save(path: Path, num_epochs: int) -> None:
    """Write a checkpoint for inference, trained in a plain loop on one process."""
    train_loader, _ = load_images()
    model = build_model()
    optimizer = build_optimizer(model)
    for _ in range(num_epochs):
        for images, labels in train_loader:
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)


def main() -> None:
    arguments = parse_arguments(
        "Infer on all processes.",
        checkpoint={"type": Path, "default": Path("runs/digits.pt"), "help": "file"},
    )
    state = PartialState()
    set_seed(42)
    if state.is_main_process:
        train_and_save(arguments.checkpoint, arguments.num_epochs)
    state.wait_for_everyone()

    model = build_model().to(state.device)
    model.load_state_dict(torch.load(arguments.checkpoint, map_location=state.device))
    model.eval()
    questions = [image for image, _ in load_images()[1].dataset]
    answers = []
    with state.split_between_processes(questions) as share, torch.inference_mode():
        for image in share:
            answers.append(int(model(image.to(state.device)).argmax()))
    state.print(f"{len(answers)} of {len(questions)} images on the first process")

    answers = gather_object(answers)
    truth = [int(label) for _, label in load_images()[1].dataset]
    right = sum(answer == label for answer, label in zip(answers, truth, strict=True))
    state.print(f"accuracy: {right / len(truth):.3f}")


if __name__ == "__main__":
    main()
