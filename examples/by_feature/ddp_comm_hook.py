"""Compress gradients with a communication hook.

    accelerate launch --cpu --num_processes 2 examples/by_feature/ddp_comm_hook.py --comm_hook bf16

`fp16` and `bf16` halve the bytes that are sent. `power_sgd` sends two low-rank matrices instead of each
gradient, after some uncompressed steps, and can be combined with a 16-bit format. `batched_power_sgd` is not
offered here: in torch 2.13 it fails inside torch at its first compressed step.
"""

from digits_task import build_model, build_optimizer, load_images, measure_accuracy, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, set_seed

FORMATS = ["no", "fp16", "bf16"]


def main() -> None:
    arguments = parse_arguments(
        "Train with compressed gradients.",
        comm_hook={
            "choices": [*FORMATS, "power_sgd"],
            "default": "bf16",
            "help": "the format of gradients in the all-reduce",
        },
        comm_wrapper={"choices": FORMATS, "default": "no", "help": "the format around power_sgd"},
    )
    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(arguments.comm_hook),
        comm_wrapper=DDPCommunicationHookType(arguments.comm_wrapper),
        comm_state_option={"start_powerSGD_iter": 20} if arguments.comm_hook == "power_sgd" else {},
    )
    accelerator = Accelerator(kwargs_handlers=[handler])
    set_seed(42)
    train_loader, test_loader = load_images()
    model = build_model()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, build_optimizer(model), train_loader, test_loader
    )

    for _ in range(arguments.num_epochs):
        for images, labels in train_loader:
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()

    accelerator.print(f"accuracy: {measure_accuracy(accelerator, model, test_loader):.3f}")


if __name__ == "__main__":
    main()
