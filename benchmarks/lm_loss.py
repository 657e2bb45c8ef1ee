"""The loss without logits beside the plain loss of a model of transformers: time, peak and plan of a step.

The model is a small Llama with the vocabulary of Llama 2. The time is processor time of a forward and
backward pass on one thread. The peak is that of a training step by the allocations that torch's profiler
records.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.losses import use_lm_loss
from accelerate.state import AcceleratorState, GradientState
from families import Batch, Family, of_config, plan_and_run
from pairing import Pair, measure, report

VOCABULARY, SAMPLES, LENGTH = 32000, 2, 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
SLICE = 1024
"""Entries of the vocabulary whose logits exist at a time."""
LOGITS = 4 * VOCABULARY * SAMPLES * LENGTH
"""Bytes of the logits in float32."""
TIME, PLAN = 1.15, 5.0
"""Largest ratio of times, and percent by which a plan may differ from the allocations."""
PRECISIONS = ("no", "bf16")


def batch() -> Batch:
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def model(changed: bool) -> nn.Module:
    built = of_config("LlamaForCausalLM", "LlamaConfig", SIZES)
    return use_lm_loss(built, SLICE) if changed else built


def accelerator(precision: str) -> Accelerator:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, mixed_precision=precision)


def run_passes(run: Accelerator, prepared: nn.Module, given: Batch) -> None:
    run.backward(prepared(**given).loss)


def compare_times(precision: str) -> Pair:
    run, given = accelerator(precision), batch()
    plain, ours = (partial(run_passes, run, run.prepare(model(changed)), given) for changed in (False, True))
    return measure(f"forward and backward, {precision}", plain, ours, budget=TIME, repetitions=1, rounds=5)


def compare_peaks(precision: str) -> list[Pair]:
    """Returns the pairs of a plan and a step for both losses, and that of the two peaks."""
    pairs, peaks = [], []
    for changed in (False, True):
        family = Family(partial(model, changed), batch, {}, PLAN)
        predicted, allocated = plan_and_run(family, accelerator(precision))
        error = 100 * abs(predicted - allocated) / allocated
        name = f"plan of the {'loss without logits' if changed else 'plain loss'}, {precision}"
        pairs.append(Pair(name, allocated, predicted, error, PLAN, "%", "B"))
        peaks.append(allocated)
    plain, ours = peaks
    # The figure is the share of the logits, at least one copy in float32, that the peak still has.
    left = 100 * max(0.0, 1 - (plain - ours) / LOGITS)
    return [*pairs, Pair(f"logits in the peak, {precision}", plain, ours, left, 5.0, "%", "B")]


def compare_with_torch() -> list[Pair]:
    """Returns the pair of torch's function in chunks of tokens and of the loss in slices, if torch has it."""
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        return []
    run, width = accelerator("no"), SIZES["hidden_size"]
    hidden, head = torch.randn(SAMPLES * LENGTH, width, requires_grad=True), nn.Linear(width, VOCABULARY)
    labels, options = torch.randint(0, VOCABULARY, (len(hidden),)), nn.LinearCrossEntropyOptions()

    def of_torch() -> None:
        nn.functional.linear_cross_entropy(
            hidden, head.weight, labels, linear_bias=head.bias, options=options
        ).backward()

    def ours() -> None:
        run.lm_loss(hidden, head, labels, shift=False).backward()

    return [
        measure("torch's linear_cross_entropy, float32", of_torch, ours, budget=TIME, repetitions=1, rounds=5)
    ]


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    planned = [pair for precision in PRECISIONS for pair in compare_peaks(precision)]
    times = [compare_times(precision) for precision in PRECISIONS]
    title = "Loss without logits (raw: plain loss or allocated, ours: lm_loss or predicted)"
    return report([*times, *compare_with_torch(), *planned], title)


if __name__ == "__main__":
    sys.exit(main())
