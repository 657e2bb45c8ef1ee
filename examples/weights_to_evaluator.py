"""Evaluate a model in another process while it trains, with the weights in shared memory.

    python examples/weights_to_evaluator.py
    accelerate launch --cpu --num_processes 2 examples/weights_to_evaluator.py --fsdp

Every few steps rank 0 copies the weights to shared memory, one bucket at a time, and sends the step to the
evaluator. The evaluator has a plain model whose weights are that memory, and answers with the accuracy on
held-out images. The ranks go on training until they hand over the next weights. An inference engine would
take the place of the evaluator.
"""

import argparse

import torch
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed

HELD_OUT = 360  # of 1797 images


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return the images of scikit-learn for training and those for evaluation."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = order[HELD_OUT:], order[:HELD_OUT]
    return tuple(TensorDataset(images[part], labels[part]) for part in parts)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def evaluate(weights: dict[str, torch.Tensor], requests: mp.SimpleQueue, answers: mp.SimpleQueue) -> None:
    """Answer each step with its accuracy, until the step is None. Runs in the process of the evaluator."""
    images, labels = load_images()[1].tensors
    with torch.device("meta"):
        model = build_model()
    model.load_state_dict(weights, assign=True)  # the parameters are the shared memory
    model.eval()
    while (step := requests.get()) is not None:
        with torch.inference_mode():
            accuracy = (model(images).argmax(-1) == labels).float().mean().item()
        answers.put((step, accuracy))


class Evaluator:
    """The process that evaluates, and the shared memory with the weights that it reads."""

    def __init__(self) -> None:
        self.weights = {name: tensor.share_memory_() for name, tensor in build_model().state_dict().items()}
        context = mp.get_context("spawn")
        self.requests, self.answers = context.SimpleQueue(), context.SimpleQueue()
        arguments = (self.weights, self.requests, self.answers)
        self.process = context.Process(target=evaluate, args=arguments, daemon=True)
        self.process.start()
        self.is_busy = False

    def wait(self) -> None:
        """Print the accuracy of the weights that were handed over last."""
        if self.is_busy:
            step, accuracy = self.answers.get()
            print(f"step {step}: accuracy {accuracy:.3f}", flush=True)
            self.is_busy = False

    def hand_over(self, step: int, stream) -> None:
        self.wait()  # the evaluator still reads the last weights
        for name, tensor in stream:
            self.weights[name].copy_(tensor)
        self.requests.put(step)
        self.is_busy = True

    def close(self) -> None:
        self.wait()
        self.requests.put(None)
        self.process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two evaluations")
    parser.add_argument("--fsdp", action="store_true", help="shard the model over the processes")
    options = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if options.fsdp else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(42)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(load_images()[0], batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    evaluator = Evaluator() if accelerator.is_main_process else None
    step = 0
    while step < options.steps:
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % options.every == 0:
                stream = accelerator.stream_weights(model, bucket_size="1MB")
                if evaluator is not None:
                    evaluator.hand_over(step, stream)
                else:
                    for _ in stream:  # the other ranks run the loop, which has no iterations on them
                        pass
            if step == options.steps:
                break
    if evaluator is not None:
        evaluator.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
