"""A step on sequences that two processes divide: Ulysses by torch beside others.

Context parallelism and Ulysses train a small causal transformer in the same block, with the same sequences.
If deepspeed and transformers are installed, Ulysses by DeepSpeed and by torch train a model of transformers
with whole replicas. Processor seconds of rank 0 are measured, and losses are compared. Beside context
parallelism, collectives and the bytes that rank 0 receives are counted, gradients of replicas included;
those of DeepSpeed are not all operators of torch. Step 4, which compares its forward with that of whole
sequences, is measured apart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from pairing import Pair, measure, report, time_round
from ranks import start
from whole_matrices import Collectives

PROCESSES, ROUNDS = 2, 15
ATTENTION = "sdpa"
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 4, 128, 4, 512, 1024
WAYS: tuple[dict[str, Any], ...] = (
    {"cp_size": PROCESSES},
    {"sp_size": PROCESSES, "sp_backend": "torch"},
)
TIME, COLLECTIVES, BYTES, LOSS, COMPARED = 1.2, 1.1, 0.75, 10.0, 3.0
"""Largest ratios to the other way, difference of the losses in millionths, and ratio of a compared step."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        heads = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.inputs(first(x)).chunk(3, -1)
        )
        attended = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.widen(second(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens) + self.positions(positions)))


def step(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Train one step, and return the mean loss of the positions of this rank."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH).square() % VOCABULARY
    buffers = [tokens, tokens.roll(-1, 1), torch.arange(LENGTH).repeat(2, 1)]
    with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
        inputs, labels, positions = buffers
        loss = cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten())
        accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def prepare(sizes: dict[str, Any]) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    torch.manual_seed(0)
    model = Net()
    return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3)))


def run_rank() -> list[Pair] | None:
    ways = [partial(step, *prepare(sizes)) for sizes in WAYS]
    return compare("context parallelism", ways, ways[-1].args[0], is_counted=True)


def compare(
    other: str, ways: list[Callable[[], Tensor]], accelerator: Any, *, is_counted: bool
) -> list[Pair] | None:
    """Return the figures of another way to train and of Ulysses by torch, on rank 0.

    Args:
        other: Name of the other way.
        ways: Train a step, and return the mean loss of a rank.
        accelerator: Any of both.
        is_counted: Whether all collectives are operators of torch, which can be counted.
    """
    losses, calls, received, compared = [], [], [], []
    for way in ways:
        way()  # compares the model with whole sequences
        way()  # builds the buckets of gradients again
        with Collectives() as counted:
            loss = way()
        calls.append(counted.calls)
        received.append(counted.received)
        losses.append(float(accelerator.reduce(loss, "mean")))
        compared.append(time_round(way, 1))
    counts = [
        Pair(f"{other}: collectives", *calls, calls[1] / calls[0], COLLECTIVES, measured="n"),
        Pair(f"{other}: received bytes", *received, received[1] / received[0], BYTES, measured="B"),
    ]
    difference = 1e6 * abs(losses[1] / losses[0] - 1)
    plain = measure(f"{other}: processor time", *ways, budget=TIME, repetitions=1, rounds=ROUNDS)
    pairs = [
        plain,
        Pair(f"{other}: step 4 of Ulysses", plain.ours, compared[1], compared[1] / plain.ours, COMPARED),
        *(counts if is_counted else ()),
        Pair(f"{other}: difference of the losses", *losses, difference, LOSS, "ppm", "n"),
    ]
    is_first = accelerator.is_main_process
    accelerator.end_training()
    return pairs if is_first else None


# DeepSpeed


def shard(tensor: Tensor, accelerator: Any) -> Tensor:
    """Return the part of this rank of sequences, as DeepSpeed's loader does."""
    return tensor.chunk(PROCESSES, 1)[accelerator.process_index]


def with_attention(step: Callable[..., Tensor], attention: Any, *args: Any) -> Tensor:
    """Train one step by a function of attention, because DeepSpeed replaces that of all models."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[ATTENTION] = attention
    return step(*args)


def step_by_deepspeed(accelerator: Any, model: nn.Module, optimizer: Any) -> Tensor:
    """Train one step in the loop of DeepSpeed, whose loss of a rank is its part of the whole loss."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH).square() % VOCABULARY
    labels = shard(nn.functional.pad(tokens[:, 1:], (0, 1), value=-100), accelerator)
    positions = shard(torch.arange(LENGTH).repeat(2, 1), accelerator)
    logits = model(input_ids=shard(tokens, accelerator), position_ids=positions, use_cache=False).logits
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = total / accelerator.reduce((labels != -100).sum(), "sum")
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return PROCESSES * loss.detach()


def step_by_torch(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Train one step in the loop of one process."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH).square() % VOCABULARY
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def prepare_llama(backend: str) -> tuple[Any, ...]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,  # the default of DeepSpeed is 1
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config) if backend == "deepspeed" else None
    mesh = ParallelismConfig(sp_size=PROCESSES, sp_backend=backend)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=mesh)
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=HEADS, attn_implementation=ATTENTION, **sizes)
    )
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return ALL_ATTENTION_FUNCTIONS[ATTENTION], accelerator, *prepared


def run_beside_deepspeed() -> list[Pair] | None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    ways = [
        partial(with_attention, step_by_torch, *prepare_llama("torch")),
        partial(with_attention, step_by_deepspeed, *prepare_llama("deepspeed")),
    ]
    return compare("DeepSpeed", ways[::-1], ways[1].args[2], is_counted=False)


def main() -> int:
    from accelerate.utils import is_deepspeed_available, is_transformers_available

    [pairs] = start(run_rank, PROCESSES)
    if is_deepspeed_available() and is_transformers_available():
        [beside] = start(run_beside_deepspeed, PROCESSES)
        pairs += beside
    return report(pairs, "A step with Ulysses by torch (ours) and with another way (raw), two processes")


if __name__ == "__main__":
    sys.exit(main())
