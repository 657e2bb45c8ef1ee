"""Run inference with a model that is larger than the available memory.

    accelerate launch --cpu examples/by_feature/big_model_inference.py

The model is created on the meta device and loaded from a sharded checkpoint. A device map gives the device of
each module: modules that do not fit in memory stay in the files and are loaded when they run. GPU memory is
filled first; here `--max_memory` limits the memory of the CPU.
"""

from pathlib import Path

from digits_task import build_optimizer, load_images, measure_accuracy, parse_arguments
from torch import nn
from torch.nn.functional import cross_entropy

from accelerate import Accelerator, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.big_modeling import explain_device_map
from accelerate.utils import set_seed


def build_model() -> nn.Module:
    """Return a net of six blocks, 300 kB in all."""
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(64, 128), *blocks, nn.Linear(128, 10))


def train_and_save(accelerator: Accelerator, folder: Path, num_epochs: int) -> None:
    """Write a checkpoint in shards of at most 80 kB."""
    train_loader, _ = load_images()
    model = build_model()
    model, optimizer, train_loader = accelerator.prepare(model, build_optimizer(model), train_loader)
    for _ in range(num_epochs):
        for images, labels in train_loader:
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_model(model, folder, max_shard_size="80KB")
    accelerator.wait_for_everyone()


def main() -> None:
    arguments = parse_arguments(
        "Infer with little memory.",
        checkpoint={"type": Path, "default": Path("runs/big_model"), "help": "folder of the checkpoint"},
        max_memory={"default": "250KB", "help": "memory that the weights may take"},
    )
    accelerator = Accelerator()
    set_seed(42)
    train_and_save(accelerator, arguments.checkpoint, arguments.num_epochs)

    with init_empty_weights():
        model = build_model()
    max_memory = {"cpu": arguments.max_memory, "disk": "1GB"}
    device_map = infer_auto_device_map(model, max_memory=max_memory)
    accelerator.print(explain_device_map(model, device_map))
    model = load_checkpoint_and_dispatch(
        model, arguments.checkpoint, device_map=device_map, offload_folder=arguments.checkpoint / "offload"
    )
    test_loader = accelerator.prepare(load_images()[1])
    accelerator.print(f"accuracy: {measure_accuracy(accelerator, model, test_loader):.3f}")


if __name__ == "__main__":
    main()
