"""Profile the time and memory of training steps.

    accelerate launch --cpu --num_processes 2 examples/by_feature/profiler.py

`accelerator.profile` runs torch's profiler with one trace per rank, which can be opened at ui.perfetto.dev;
`accelerator.peak_memory` measures the peak memory of each rank.
"""

from pathlib import Path

from digits_task import build_model, build_optimizer, load_images, measure_accuracy, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs, set_seed


def main() -> None:
    arguments = parse_arguments(
        "Profile a few steps of a training.",
        traces={"default": "runs/traces", "help": "folder of the traces"},
    )
    cycles = ProfileKwargs(
        activities=["cpu"],
        record_shapes=True,
        schedule_option={"skip_first": 5, "wait": 1, "warmup": 1, "active": 3, "repeat": 1},
        output_trace_dir=arguments.traces,
    )
    accelerator = Accelerator(kwargs_handlers=[cycles])
    set_seed(42)
    train_loader, test_loader = load_images()
    model = build_model()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, build_optimizer(model), train_loader, test_loader
    )

    with accelerator.peak_memory() as used, accelerator.profile() as profiler:
        for _ in range(arguments.num_epochs):
            for images, labels in train_loader:
                accelerator.backward(cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()

    accelerator.wait_for_everyone()
    accelerator.print(f"traces: {len(list(Path(arguments.traces).rglob('*.json')))}")
    accelerator.print(used)
    accelerator.print(f"accuracy: {measure_accuracy(accelerator, model, test_loader):.3f}")


if __name__ == "__main__":
    main()
