"""Measure the memory and the time of each policy of activation checkpointing, for a small transformer.

The memory is the peak of a forward and backward pass by the allocations that torch's profiler records. It
does not include parameters, nor gradients, which are freed as soon as they exist. The time is processor time
on one thread. All policies take turns in each round.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ActivationCheckpointing
from families import record_allocations
from pairing import Work, time_round

LAYERS, WIDTH, SHAPE = 8, 512, (2, 256)
ROUNDS = 15
POLICIES: dict[str, ActivationCheckpointing | None] = {
    "nothing": None,
    '`save_operators="matmul"`': ActivationCheckpointing(save_operators="matmul"),
    "`every=8`": ActivationCheckpointing(every=8),
    "`every=4`": ActivationCheckpointing(every=4),
    "`every=2`": ActivationCheckpointing(every=2),
    "all blocks": ActivationCheckpointing(),
}
"""What is recomputed, as in the guide -> policy."""


class Layer(nn.Module):
    """Layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, 8, WIDTH // 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def pass_of(policy: ActivationCheckpointing | None) -> Work:
    """Returns a function that runs a forward and backward pass of a prepared model."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[] if policy is None else [policy])
    model = accelerator.prepare(Net())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(free_gradient)
    hidden = torch.randn(*SHAPE, WIDTH)
    return partial(run_passes, accelerator, model, hidden)


def run_passes(accelerator: Accelerator, model: nn.Module, hidden: Tensor) -> None:
    accelerator.backward(model(hidden))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    works = {name: pass_of(policy) for name, policy in POLICIES.items()}
    for work in works.values():
        work()
    rounds = [{name: time_round(work, 1) for name, work in works.items()} for _ in range(ROUNDS)]
    tokens = " x ".join(map(str, SHAPE))
    print(f"{LAYERS} layers of a transformer, width {WIDTH}, {tokens} tokens, float32, one thread.")
    print("| recomputed | activations | forward and backward |\n|---|---|---|")
    for name, work in works.items():
        seconds = median(times[name] for times in rounds)
        print(f"| {name} | {record_allocations(work) / 1e6:.0f} MB | {1000 * seconds:.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
