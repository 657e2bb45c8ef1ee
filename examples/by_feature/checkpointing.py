"""Save the state of a run each epoch, and resume from it.

    accelerate launch --cpu --num_processes 2 examples/by_feature/checkpointing.py --num_epochs 6
    accelerate launch --cpu --num_processes 2 examples/by_feature/checkpointing.py --resume

`save_state` writes the model, the optimizer, the order of the data and the random number generator states;
`register_for_checkpointing` adds your own object. `load_state` without a folder loads the newest complete
checkpoint of the project. `examples/restart.py` saves and resumes in the middle of an epoch.
"""

from digits_task import build_model, build_optimizer, load_images, measure_accuracy, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


class Progress:
    """The number of finished epochs."""

    def __init__(self) -> None:
        self.num_epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_epochs": self.num_epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_epochs = state["num_epochs"]


def main() -> None:
    arguments = parse_arguments(
        "Save each epoch, and resume.",
        project_dir={"default": "runs/checkpointing", "help": "folder of the checkpoints"},
        resume={"action": "store_true", "help": "resume from the newest checkpoint"},
    )
    project = ProjectConfiguration(arguments.project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    set_seed(42)
    train_loader, test_loader = load_images()
    model = build_model()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, build_optimizer(model), train_loader, test_loader
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if arguments.resume:
        accelerator.load_state()
    accelerator.print(f"{progress.num_epochs} epochs are done")

    while progress.num_epochs < arguments.num_epochs:
        for images, labels in train_loader:
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        progress.num_epochs += 1
        accelerator.save_state()

    accelerator.print(f"accuracy: {measure_accuracy(accelerator, model, test_loader):.3f}")


if __name__ == "__main__":
    main()
