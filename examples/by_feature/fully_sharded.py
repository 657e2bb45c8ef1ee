"""Shard parameters, gradients and optimizer state (FSDP 2), and save the full model.

    accelerate launch --cpu --num_processes 2 examples/by_feature/fully_sharded.py

The plugin selects the modules that are sharded: here each linear layer with at least a thousand parameters.
The flags of the launcher (`--use_fsdp --fsdp_version 2 ...`) and a plain `Accelerator()` do the same.
`save_model` gathers the shards: any program can load the file.
"""

from pathlib import Path

from digits_task import build_model, build_optimizer, load_images, measure_accuracy, parse_arguments
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed


def main() -> None:
    arguments = parse_arguments(
        "Train a model in parts.", output={"default": "runs/fully_sharded", "help": "folder of the model"}
    )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(42)
    train_loader, test_loader = load_images()
    model = build_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, build_optimizer(model), train_loader, test_loader
    )
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    here = sum(part.numel() for part in parts)
    accelerator.print(f"{here} of {num_parameters} parameters are on the first process")

    for _ in range(arguments.num_epochs):
        for images, labels in train_loader:
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    accelerator.print(f"accuracy: {measure_accuracy(accelerator, model, test_loader):.3f}")
    accelerator.save_model(model, arguments.output)
    if accelerator.is_main_process:
        plain = build_model()
        plain.load_state_dict(load_file(Path(arguments.output) / "model.safetensors"))
        print(f"a plain model took {len(plain.state_dict())} tensors")


if __name__ == "__main__":
    main()
