"""Run inference with a model split into pipeline stages, one per rank.

    accelerate launch --cpu --num_processes 2 examples/by_feature/pipeline_inference.py

`prepare_pippy` splits the model into one stage per rank. A batch is split into micro-batches, so that all
stages compute at the same time. All ranks call the model; the arguments of rank 0 are used.
"""

import torch
from digits_task import build_model, build_optimizer, load_images, measure_accuracy, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import Accelerator, prepare_pippy
from accelerate.utils import set_seed


def main() -> None:
    arguments = parse_arguments("Train on all processes, then infer in stages.")
    accelerator = Accelerator()
    set_seed(42)
    train_loader, test_loader = load_images()
    model = build_model()
    model, optimizer, train_loader, prepared_test_loader = accelerator.prepare(
        model, build_optimizer(model), train_loader, test_loader
    )
    for _ in range(arguments.num_epochs):
        for images, labels in train_loader:
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"whole: {measure_accuracy(accelerator, model, prepared_test_loader):.3f}")

    stages = accelerator.unwrap_model(model).eval()
    example = torch.zeros(64, 64, device=accelerator.device)
    stages = prepare_pippy(stages, example_args=(example,), gather_output=True)
    accelerator.print(f"stages begin with: {', '.join(stages.hf_split_points) or 'the model'}")
    num_right = 0
    for images, labels in test_loader:
        with torch.no_grad():
            guesses = stages(images.to(accelerator.device)).argmax(dim=1).cpu()
        num_right += int((guesses == labels).sum())
    accelerator.print(f"accuracy: {num_right / len(test_loader.dataset):.3f}")


if __name__ == "__main__":
    main()
