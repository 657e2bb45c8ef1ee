"""Find the largest batch size that fits in memory.

    accelerate launch --cpu --num_processes 2 examples/by_feature/memory.py

`find_executable_batch_size` calls the training function again with half the batch size if any rank runs out
of memory. Create everything that depends on the batch size, and every prepared object, inside the function;
`free_memory` releases the objects of the failed attempt. The images of this example fit in any memory, so the
script raises an out-of-memory error itself above `--pretend_limit`.
"""

from digits_task import build_model, build_optimizer, load_images, measure_accuracy, parse_arguments
from torch.nn.functional import cross_entropy

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed


def main() -> None:
    arguments = parse_arguments(
        "Train with the largest batch that fits.",
        batch_size={"type": int, "default": 128, "help": "the size that is tried first"},
        pretend_limit={"type": int, "default": 32, "help": "the largest batch that is said to fit"},
    )
    accelerator = Accelerator()

    @find_executable_batch_size(starting_batch_size=arguments.batch_size)
    def train(batch_size: int) -> float:
        accelerator.free_memory()
        accelerator.print(f"trying batches of {batch_size}")
        set_seed(42)
        train_loader, test_loader = load_images(batch_size)
        model = build_model()
        model, optimizer, train_loader, test_loader = accelerator.prepare(
            model, build_optimizer(model), train_loader, test_loader
        )
        for _ in range(arguments.num_epochs):
            for images, labels in train_loader:
                if len(images) > arguments.pretend_limit:
                    raise RuntimeError("CUDA out of memory. (No: this script pretends.)")
                accelerator.backward(cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
        return measure_accuracy(accelerator, model, test_loader)

    accelerator.print(f"accuracy: {train():.3f}")


if __name__ == "__main__":
    main()
